// Stands in for the header of that name in NVIDIA's compiler package, which other headers of theirs include.
#pragma once
#include "../language.h"
#define __device_builtin__
