// Replaces the header of this name in NVIDIA's compiler package, which other headers of NVIDIA include.
#pragma once
#include "../language.h"
#define __device_builtin__
