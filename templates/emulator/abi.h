// What a SIMT image offers to those who launch it: the Python launcher by ctypes, the emulated driver by dlsym.
//
// An image is a shared library: kernels in the text that NVRTC compiles, and the executor that runs them on the CPU.
// One launch at a time an image; the caller holds a lock.
#pragma once

#include <cstdint>

extern "C" {

// A range of global memory that a launch may touch.
struct SimtRegion {
    const char* name;  // for messages and counters
    uint64_t begin;    // address
    uint64_t bytes;
    uint8_t* defined;  // a byte for each: nonzero once it was written. Null: all of it is defined
    uint32_t writable;
    uint32_t reserved;
};

enum SimtFlags : uint32_t {
    SIMT_COUNT = 1,        // run warps in lockstep and count what their memory instructions cost
    SIMT_OPEN_MEMORY = 2,  // addresses outside of all regions are allowed, and not checked
};

struct SimtLaunch {
    const char* kernel;  // symbol
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t dynamic_shared;  // bytes
    uint32_t flags;
    uint64_t seed;              // of the schedule
    void** arguments;           // address of each argument's value
    const SimtRegion* regions;  // must not overlap
    uint32_t region_count;
    uint32_t reserved;
};

// A place in a kernel. `offset` is that of an instruction in the image, for addr2line; 0: unknown.
struct SimtPlace {
    uint32_t block[3];
    uint32_t thread[3];
    uint64_t offset;
};

// The first bug that a launch met. The launch stops there.
struct SimtReport {
    char kind[32];      // "out-of-bounds", "race", "misaligned", "uninitialised", "divergent-barrier", ...
    char message[512];  // what happened, without the places
    char kernel[256];
    SimtPlace place;
    SimtPlace other;  // of a race: the earlier access
    uint32_t has_other;
    uint32_t reserved;
};

// Counters of one region, or of shared memory, for loads or for stores: warp instructions as the source issues them.
struct SimtTraffic {
    uint64_t instructions;  // with at least one active lane
    uint64_t idle;          // with none: all lanes were predicated off
    uint64_t lanes;         // active, summed over instructions
    uint64_t bytes;         // asked for, by all lanes
    uint64_t useful;        // the same without what several lanes of an instruction ask for twice
    uint64_t sectors;       // of 32 bytes touched, summed over instructions
};

struct SimtCounters {
    SimtTraffic shared_loads, shared_stores;  // sectors: wavefronts of 32 banks of 4 bytes
    uint64_t bank_conflicts;                  // wavefronts beyond those that the bytes need
    uint64_t barriers;                        // a block counts once
    uint64_t warp_syncs;                      // shuffles, votes, __syncwarp: a warp counts once
    uint64_t atomics;                         // warp instructions
    uint64_t atomic_lanes;
};

struct SimtKernelInfo {
    const char* name;
    uint32_t argument_count;
    const uint32_t* argument_bytes;
    uint32_t static_shared;  // bytes
    uint32_t max_threads;    // a block, by __launch_bounds__; 1024 without
};

// 0: done. 1: a bug was found, `report` tells. 2: the launch itself is impossible (unknown kernel, too many threads).
int simt_launch(const SimtLaunch* launch, SimtReport* report);

// Of the last launch with SIMT_COUNT. `loads` and `stores` have an element a region, in the launch's order.
void simt_counters(SimtCounters* counters, SimtTraffic* loads, SimtTraffic* stores);

uint32_t simt_kernel_count(void);
const SimtKernelInfo* simt_kernel(uint32_t index);
const char* simt_arch(void);  // "sm_90"
uint32_t simt_abi(void);      // SIMT_ABI
}

constexpr uint32_t SIMT_ABI = 1;
