// Copies by library functions, which the compiler does not watch: an image calls the executor's instead. This has to be
// said before any other header declares them.
#pragma once

#include <cstddef>

extern "C" {
void* memcpy(void* to, const void* from, std::size_t bytes) noexcept __asm__("simt_copy");
void* memmove(void* to, const void* from, std::size_t bytes) noexcept __asm__("simt_copy");
void* memset(void* to, int byte, std::size_t bytes) noexcept __asm__("simt_fill");
}
