// One row's segment of a GGUF matrix, from the file's order of bits to the one that kernels want.
//
// Kernels take the codes of four values as the bytes of a word. Where a type packs codes below a
// byte, the file's order would cost several instructions a word; with the bits transposed it is one
// shift and one mask. Parts of a block are moved so that words are aligned. Nothing is added or
// lost: Restore gives the file's bytes back.
//
// In order of increasing value; words are little endian; v counts the vectors of 8 values in a
// block of 32:
//   IQ4_NL, IQ4_XS, MXFP4  each word of nibbles: the four low nibbles, then the four high ones
//   Q2_0      each word: bits [8j + 2k, +2) for value 4k + j, k and j in 0..3
//   Q1_0      each word: bit 8j + i for value 4i + j, j in 0..3, i in 0..7 ("split")
//   IQ3_S     64 index bytes; 8 split words of signs; 2 words of high index bits (byte j, bit b of
//             word m: vector 4m + j of block b); 4 bytes of scales; d
//   IQ2_S     32 index bytes; 8 split words of signs; 8 bytes of high index bits; 8 of scales; d
//   IQ2_XXS   8 times a word of indices and one of signs; d
//   IQ2_XS    8 times a word of the indices' low bytes and one of signs; 8 bytes of scales; d
//   IQ3_XXS   64 index bytes; 8 words of signs; d
// The last three store 7 signs for 8 values. Their words are split as if bit 7 of a vector, which
// lands on bit 25 + 2v, were a sign: there lies bit v of the block's scale, in IQ2_XS the high bit
// of index v.
#pragma once

#include <cstdint>

#include "common/gguf_types.h"

namespace strata {

// `num_bytes`: of the segment, a whole number of stored blocks. The buffers must not overlap.
void ArrangeSegment(GgmlType type, int block_bytes, const uint8_t* stored, int num_bytes,
                    uint8_t* segment);

// The inverse; uses `segment` as scratch.
void RestoreSegment(GgmlType type, int block_bytes, uint8_t* segment, int num_bytes,
                    uint8_t* stored);

}  // namespace strata
