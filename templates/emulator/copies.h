// Library functions that copy. The compiler does not instrument them, so an image calls functions of the executor
// instead. These declarations have to come before those of any other header.
#pragma once

#include <cstddef>

extern "C" {
void* memcpy(void* to, const void* from, std::size_t bytes) noexcept __asm__("simt_copy");
void* memmove(void* to, const void* from, std::size_t bytes) noexcept __asm__("simt_copy");
void* memset(void* to, int byte, std::size_t bytes) noexcept __asm__("simt_fill");
}
