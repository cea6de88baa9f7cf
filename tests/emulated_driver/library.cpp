// The whole library as one translation unit: it compiles in a third of the time.
#include "device.cpp"
#include "entry.cpp"
#include "graph.cpp"
#include "image.cpp"
#include "launch.cpp"
#include "memory.cpp"
#include "stream.cpp"
#include "table.cpp"
