// The GGUF tensor types that this project computes with, and how each maps onto the common form
// of numerics.md (contract T): int8 codes w, an integer factor per group, float32 scales per block.
#pragma once

#include <cstdint>

namespace strata {

// Values are the ggml type ids found in files.
enum class GgmlType : int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ2_XXS = 16,
  kIQ2_XS = 17,
  kIQ3_XXS = 18,
  kIQ1_S = 19,
  kIQ4_NL = 20,
  kIQ3_S = 21,
  kIQ2_S = 22,
  kIQ4_XS = 23,
  kIQ1_M = 29,
  kBF16 = 30,
  kMXFP4 = 39,
  kQ1_0 = 41,
  kQ2_0 = 42,
};

// How the integer part of a block of 32 is formed. I = sum over groups of factor * sum(w * q).
enum class Form : int32_t {
  kFloat,     // not quantised: x stays float32
  kPlain,     // G = 32, factor 1: scale D
  kMin,       // kPlain with a minimum: second term M * sum(q)
  kSplit,     // G = 16: integer factors k[2]
  kSplitMin,  // kSplit with a minimum: J = sum over groups of n * sum(q), scale M (Q2_K)
};

struct TypeInfo {
  GgmlType type;
  const char* name;
  int32_t block_values;  // values in one stored block
  int32_t block_bytes;
  Form form;
  // A code is stored as the unsigned byte w + bias, so that u8 x s8 dot products apply; the product
  // with the bias leaves again through the sum of the activation's codes, exactly, in integers.
  int32_t bias;
};

inline constexpr TypeInfo kTypes[] = {
    {GgmlType::kF32, "F32", 1, 4, Form::kFloat, 0},
    {GgmlType::kF16, "F16", 1, 2, Form::kFloat, 0},
    {GgmlType::kBF16, "BF16", 1, 2, Form::kFloat, 0},
    {GgmlType::kQ4_0, "Q4_0", 32, 18, Form::kPlain, 8},
    {GgmlType::kQ4_1, "Q4_1", 32, 20, Form::kMin, 0},
    {GgmlType::kQ5_0, "Q5_0", 32, 22, Form::kPlain, 16},
    {GgmlType::kQ5_1, "Q5_1", 32, 24, Form::kMin, 0},
    {GgmlType::kQ8_0, "Q8_0", 32, 34, Form::kPlain, 128},
    {GgmlType::kQ2_K, "Q2_K", 256, 84, Form::kSplitMin, 0},
    {GgmlType::kQ3_K, "Q3_K", 256, 110, Form::kSplit, 4},
    {GgmlType::kQ4_K, "Q4_K", 256, 144, Form::kMin, 0},
    {GgmlType::kQ5_K, "Q5_K", 256, 176, Form::kMin, 0},
    {GgmlType::kQ6_K, "Q6_K", 256, 210, Form::kSplit, 32},
    {GgmlType::kIQ2_XXS, "IQ2_XXS", 256, 66, Form::kPlain, 64},
    {GgmlType::kIQ2_XS, "IQ2_XS", 256, 74, Form::kSplit, 64},
    {GgmlType::kIQ2_S, "IQ2_S", 256, 82, Form::kSplit, 64},
    {GgmlType::kIQ3_XXS, "IQ3_XXS", 256, 98, Form::kPlain, 64},
    {GgmlType::kIQ3_S, "IQ3_S", 256, 110, Form::kPlain, 64},
    {GgmlType::kIQ1_S, "IQ1_S", 256, 50, Form::kPlain, 64},
    {GgmlType::kIQ1_M, "IQ1_M", 256, 56, Form::kSplit, 64},
    {GgmlType::kIQ4_NL, "IQ4_NL", 32, 18, Form::kPlain, 128},
    {GgmlType::kIQ4_XS, "IQ4_XS", 256, 136, Form::kPlain, 128},
    {GgmlType::kMXFP4, "MXFP4", 32, 17, Form::kPlain, 64},
    {GgmlType::kQ1_0, "Q1_0", 128, 18, Form::kPlain, 64},
    {GgmlType::kQ2_0, "Q2_0", 64, 18, Form::kPlain, 64},
};

// Null for a type id that is not in the table.
constexpr const TypeInfo* FindType(int64_t id) {
  for (const TypeInfo& info : kTypes) {
    if (static_cast<int64_t>(info.type) == id) return &info;
  }
  return nullptr;
}

}  // namespace strata
