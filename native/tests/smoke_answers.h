/* Written by native/tests/answers.py: hashes of the CPU reference's results. */
/* clang-format off */

#include <stdint.h>

#define ANSWER_DIGESTS "90be31343eee710b", "e09135fbfc01e864"
#define ANSWER_NAMES "gemm NT bf16, bias", "the same in a graph", "gemm NN f16, accumulate", "gemm TN bf16, odd", "gemm NT f32", "bmm bf16", "gemm_ragged TN bf16", "gemm_grouped NT bf16, bias", "gemm_grouped NN f32", "attention bf16, causal", "attention bf16, a cache", "attention bf16, packed", "linear_logp bf16, entropy"

static const uint64_t recorded[2][13] = {
    {0x4AD1C0104C42E5A0, 0x4AD1C0104C42E5A0, 0x2A19400DEB49315D, 0x0DD37492CB8EE922, 0x3E9AB105D502E895, 0x4547D1B5B6DE7FB0, 0xED6788C6CB88C976, 0xDD7C9AFF9EBE6789, 0xE4FCA3D6737D4E03, 0xAB4ECACD197A728F, 0x1077290EA712BCB5, 0x143678F0C3EDA161, 0x834571A7FCEC889E}, /* HOPPER */
    {0x40F38BAC9DD3BA79, 0x40F38BAC9DD3BA79, 0x64564ABDCC733F1E, 0x0DD37492CB8EE922, 0x3E9AB105D502E895, 0x489E00FE9AD41E07, 0x872CB39FF03FC1DC, 0xDD7C9AFF9EBE6789, 0xE4FCA3D6737D4E03, 0xDEB87975749C35F8, 0x1077290EA712BCB5, 0xE886C243E3066A3D, 0x5B09008DD92D4DA6}, /* AMPERE */
};
