// include/named_barriers.cuh on a CPU.
#pragma once

void meet_at(int barrier, int threads, bool waits);

template <int threads>
inline void wait_for(int barrier) {
    meet_at(barrier, threads, true);
}

template <int threads>
inline void arrive_at(int barrier) {
    meet_at(barrier, threads, false);
}
