// The keys or the values of one token and one KV head in the cache: unchanged, or as int8 with a scale. int8 rows are rounded
// like rows of activations (quantized_rows.h), so each row's bits depend on that row alone.
//
// A block of one KV head is block_size rows of head_dim. In an int8 cache, block_size float32 scales follow the rows.
#pragma once

#include "quantized_rows.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kMostHeadDim = 576;  // kMostLatentValues of latent.h

template <class C>
struct KVRow {
  const C* values = nullptr;

  static KVRow zeros() {
    static const C kZeros[kMostHeadDim] = {};
    return {kZeros};
  }
  OCTAVO_INLINE Vec read(int64_t d) const { return load(values + d); }
  OCTAVO_INLINE Vec read_first(int64_t d, int64_t n) const { return load_first(values + d, n); }
};

template <>
struct KVRow<int8_t> {
  const int8_t* values = nullptr;
  const char* scale = nullptr;  // address of a float32, of any alignment

  static KVRow zeros() {
    static const int8_t kZeros[kMostHeadDim + sizeof(float)] = {};
    return {kZeros, reinterpret_cast<const char*>(kZeros + kMostHeadDim)};
  }
  OCTAVO_INLINE Vec read(int64_t d) const { return load(values + d) * read_scale(); }
  OCTAVO_INLINE Vec read_first(int64_t d, int64_t n) const { return load_first(values + d, n) * read_scale(); }
  OCTAVO_INLINE Vec read_scale() const {
    float value;
    std::memcpy(&value, scale, sizeof(value));
    return splat(value);
  }
};

template <class C>
struct KVBlock {
  C* values;
  int64_t block_size;
  int64_t head_dim;

  KVBlock(void* cache, const int64_t (&strides)[2], int64_t block, int64_t head, int64_t block_size, int64_t head_dim)
      : values(static_cast<C*>(cache) + block * strides[0] + head * strides[1]),
        block_size(block_size),
        head_dim(head_dim) {}

  OCTAVO_INLINE KVRow<C> row(int64_t offset) const { return {values + offset * head_dim}; }
};

template <>
OCTAVO_INLINE KVRow<int8_t> KVBlock<int8_t>::row(int64_t offset) const {
  return {values + offset * head_dim, reinterpret_cast<const char*>(values + block_size * head_dim) + offset * 4};
}

template <class T>
void write_row(const KVBlock<int8_t>& block, int64_t offset, const T* x) {
  const RowScale found = row_scale(x, block.head_dim);
  int8_t* out = block.values + offset * block.head_dim;
  for (int64_t d = 0; d < block.head_dim; d += kLanes) {
    const int64_t n = smaller(int64_t{kLanes}, block.head_dim - d);
    int8_t bytes[kLanes];
    store_bytes(bytes, to_int(load_first(x + d, n) * splat(found.inverse)));
    std::memcpy(out + d, bytes, static_cast<size_t>(n));
  }
  std::memcpy(block.values + block.block_size * block.head_dim + offset * 4, &found.scale, sizeof(float));
}

template <class T>
void write_row(const KVBlock<T>& block, int64_t offset, const T* x) {
  std::memcpy(static_cast<void*>(block.values + offset * block.head_dim), x,
              static_cast<size_t>(block.head_dim) * sizeof(T));
}

// Calls f(T{}, C{}) for activations of type T and a cache of type C.
template <class F>
void with_kv_types(DType dtype, DType kv_dtype, F&& f) {
  const bool is_int8 = kv_dtype == DType::kInt8;
  if (dtype == DType::kFloat32) {
    is_int8 ? f(float{}, int8_t{}) : f(float{}, float{});
  } else {
    is_int8 ? f(bf16{}, int8_t{}) : f(bf16{}, bf16{});
  }
}

}  // namespace octavo::OCTAVO_ISA
