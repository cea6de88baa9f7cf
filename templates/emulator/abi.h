// The interface of a SIMT image for its launchers: Python calls it by ctypes, the emulated driver by dlsym.
//
// An image is a shared library: the kernels of a text that NVRTC also compiles, and the executor that runs them on the
// CPU. An image runs one launch at a time; the caller holds a lock.
#pragma once

#include <cstdint>

extern "C" {

// A range of global memory that a launch may touch.
struct SimtRegion {
    const char* name;  // for messages and counters
    uint64_t begin;    // address
    uint64_t bytes;
    uint8_t* defined;  // for each byte, whether it was written (nonzero). Null: all bytes are defined
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
    uint64_t seed;              // decides the schedule
    void** arguments;           // address of each argument's value
    const SimtRegion* regions;  // must not overlap
    uint32_t region_count;
    uint32_t reserved;
};

// A place in a kernel. `offset` is the offset of an instruction in the image, for addr2line; 0: unknown.
struct SimtPlace {
    uint32_t block[3];
    uint32_t thread[3];
    uint64_t offset;
};

// The first bug that a launch met. The launch stops there.
struct SimtReport {
    char kind[32];      // "out-of-bounds", "race", "misaligned", "uninitialised", "divergent-barrier", ...
    char message[512];  // what happened, without where
    char kernel[256];
    SimtPlace place;
    SimtPlace other;  // the earlier access of a race, or where another thread waits
    uint32_t has_other;
    uint32_t reserved;
};

// Counters of one region, or of shared memory, for loads or for stores: warp instructions as the source issues them.
struct SimtTraffic {
    uint64_t instructions;  // with at least one active lane
    uint64_t idle;          // instructions with no active lane: all were predicated off
    uint64_t lanes;         // active lanes, summed over instructions
    uint64_t bytes;         // bytes that all lanes ask for
    uint64_t useful;        // the same, but a byte that several lanes of an instruction ask for counts once
    uint64_t sectors;       // sectors of 32 bytes that are touched, summed over instructions
};

struct SimtCounters {
    SimtTraffic shared_loads, shared_stores;  // sectors: wavefronts of 32 banks of 4 bytes
    uint64_t bank_conflicts;                  // wavefronts beyond those that the bytes need
    uint64_t barriers;                        // counted once per block
    uint64_t warp_syncs;                      // shuffles, votes, __syncwarp, counted once per warp
    uint64_t atomics;                         // warp instructions
    uint64_t atomic_lanes;
};

struct SimtKernelInfo {
    const char* name;
    uint32_t argument_count;
    const uint32_t* argument_bytes;
    uint32_t static_shared;  // bytes
    uint32_t max_threads;    // threads per block by __launch_bounds__; 1024 without launch bounds
};

// Returns 0: done. 1: `report` is about a bug. 2: the launch itself is impossible (unknown kernel, too many threads).
int simt_launch(const SimtLaunch* launch, SimtReport* report);

// The counters of the last launch with SIMT_COUNT. `loads` and
// `stores` have one element per region, in the launch's order.
void simt_counters(SimtCounters* counters, SimtTraffic* loads, SimtTraffic* stores);

uint32_t simt_kernel_count(void);
const SimtKernelInfo* simt_kernel(uint32_t index);
const char* simt_arch(void);  // "sm_90"
uint32_t simt_abi(void);      // SIMT_ABI
}

constexpr uint32_t SIMT_ABI = 1;
