// Written by python -m benchmarks tables, from samebits/functions.py.
#pragma once

namespace contract {

constexpr int VOCAB_BLOCK = 128;
constexpr int CHAINS = 32;
constexpr int STATE_PIECE = 8;
constexpr int CHANNEL_BLOCK = 32;
constexpr float LOG2E = 0x1.715476p+0f;
constexpr float LN2 = 0x1.62e43p-1f;
constexpr float LN2_LOW = -0x1.05c61p-29f;
constexpr float E0 = 0x1p+0f;
constexpr float E1 = 0x1p+0f;
constexpr float E2 = 0x1.fffffap-2f;
constexpr float E3 = 0x1.55549p-3f;
constexpr float E4 = 0x1.555a6ap-5f;
constexpr float E5 = 0x1.123b28p-7f;
constexpr float E6 = 0x1.693ea6p-10f;
constexpr float P1 = 0x1.62e43p-1f;
constexpr float P2 = 0x1.ebfbep-3f;
constexpr float P3 = 0x1.c6af6cp-5f;
constexpr float P4 = 0x1.3b2a1cp-7f;
constexpr float P5 = 0x1.5f0896p-10f;
constexpr float P6 = 0x1.444004p-13f;
constexpr float L1 = -0x1p-1f;
constexpr float L2 = 0x1.555554p-2f;
constexpr float L3 = -0x1.000226p-2f;
constexpr float L4 = 0x1.99a008p-3f;
constexpr float L5 = -0x1.547244p-3f;
constexpr float L6 = 0x1.22da1cp-3f;
constexpr float L7 = -0x1.0d8542p-3f;
constexpr float L8 = 0x1.055b72p-3f;
constexpr float L9 = -0x1.38b59p-4f;
constexpr float HALF_ROOT = 0x1.6a09e6p-1f;
constexpr float TANH_SCALE = 0x1.988454p-1f;
constexpr float TANH_CUBE = 0x1.6e4e26p-5f;
constexpr float TANH_SLOPE = 0x1.12ba9cp-3f;
constexpr float DENSITY = 0x1.988454p-2f;
constexpr float G1 = -0x1.20dd78p+0f;
constexpr float G2 = -0x1.45f28cp-1f;
constexpr float G3 = -0x1.a510c8p-4f;
constexpr float G4 = 0x1.3ada8ap-6f;
constexpr float G5 = 0x1.ed1856p-15f;
constexpr float G6 = -0x1.9d5694p-10f;
constexpr float G7 = 0x1.344168p-11f;
constexpr float G8 = -0x1.bcb54p-14f;
constexpr float G9 = 0x1.0de7eap-17f;

}  // namespace contract
