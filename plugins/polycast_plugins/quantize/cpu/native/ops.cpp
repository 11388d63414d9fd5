// The ops of this library. Most stand for an op of torch: they take its arguments, the prepacked weight, the fast dtype and
// constants.

#include <torch/library.h>

#include "convolution.h"
#include "fake.h"
#include "few_rows.h"
#include "int4_linear.h"
#include "isa.h"
#include "linear.h"
#include "one_query_attention.h"
#include "pack.h"
#include "recorded_lookup.h"

namespace polycast_cpu {

using at::ScalarType;
using at::Tensor;

TORCH_LIBRARY(polycast_cpu, library) {
  library.def("isas() -> int[]", find_isas);
  library.def("best_isa() -> int", [] { return static_cast<int64_t>(best_isa()); });
  library.def("int8_pack(Tensor weight, Tensor? factors, int isa) -> Tensor[]");
  const auto def_int8 = [&](const std::string& op, const std::string& factors = ", Tensor factors") {
    const std::string prepacked = ", Tensor values, Tensor scales, Tensor offsets" + factors;
    library.def((op + prepacked + ", ScalarType dtype, bool by_row, int isa) -> Tensor").c_str());
  };
  def_int8("int8_linear(Tensor x, Tensor weight, Tensor? bias");
  def_int8("int8_matmul(Tensor x, Tensor weight");
  def_int8("int8_addmm(Tensor bias, Tensor x, Tensor weight, Scalar beta, Scalar alpha");
  for (const std::string axes : {"1", "2"}) {
    const std::string op = "int8_conv" + axes + "d", numbers = "SymInt[" + axes + "] ";
    const std::string before = "(Tensor x, Tensor weight, Tensor? bias, " + numbers + "stride, ";
    const std::string after = " padding, " + numbers + "dilation, SymInt groups";
    def_int8(op + before + numbers + after, "");
    def_int8(op + ".padding" + before + "str" + after, "");
  }
  library.def("int4_pack(Tensor weight, Tensor? factors, int group_size) -> Tensor[]");
  library.def("int4_pack_levels(Tensor levels, Tensor multipliers, Tensor scales, Tensor? factors, int terms, "
              "int group_size) -> Tensor[]");
  const auto def_int4 = [&](const std::string& op) {
    library.def((op + ", Tensor values, Tensor factors, ScalarType dtype, int group_size, int isa) -> Tensor").c_str());
  };
  def_int4("int4_linear(Tensor x, Tensor weight, Tensor? bias");
  def_int4("int4_matmul(Tensor x, Tensor weight");
  def_int4("int4_addmm(Tensor bias, Tensor x, Tensor weight, Scalar beta, Scalar alpha");
  library.def("best_simd() -> int", [] { return static_cast<int64_t>(best_simd()); });
  library.def("few_rows_linear(Tensor x, Tensor weight, Tensor? bias, Tensor cast, ScalarType dtype, int simd) -> Tensor");
  library.def("few_rows_matmul(Tensor x, Tensor weight, Tensor cast, ScalarType dtype, int simd) -> Tensor");
  library.def("few_rows_addmm(Tensor bias, Tensor x, Tensor weight, Scalar beta, Scalar alpha, Tensor cast, "
              "ScalarType dtype, int simd) -> Tensor");
  library.def("lookup_gelu(Tensor x, str approximate, Tensor cast, ScalarType dtype) -> Tensor");
  for (const std::string name : {"mish", "sigmoid", "silu", "tanh"}) {
    library.def(("lookup_" + name + "(Tensor x, Tensor cast, ScalarType dtype) -> Tensor").c_str());
  }
}

// The engine finds it by this name. Its kernel is there first, since other threads may call it as soon as it is defined.
TORCH_LIBRARY_IMPL(polycast, CPU, library) {
  library.impl("attend_one_query", attend_one_query);
}

TORCH_LIBRARY_FRAGMENT(polycast, library) {
  library.def("attend_one_query(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool is_causal, float? scale, "
              "bool shares_keys, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(polycast_cpu, CPU, library) {
  library.impl("int8_pack", int8_pack);
  library.impl("int8_linear", int8_linear);
  library.impl("int8_matmul", int8_matmul);
  library.impl("int8_addmm", int8_addmm);
  library.impl("int8_conv1d", int8_conv<1>);
  library.impl("int8_conv1d.padding", int8_conv_padding<1>);
  library.impl("int8_conv2d", int8_conv<2>);
  library.impl("int8_conv2d.padding", int8_conv_padding<2>);
  library.impl("int4_pack", int4_pack);
  library.impl("int4_pack_levels", int4_pack_levels);
  library.impl("int4_linear", int4_linear);
  library.impl("int4_matmul", int4_matmul);
  library.impl("int4_addmm", int4_addmm);
  library.impl("few_rows_linear", few_rows_linear);
  library.impl("few_rows_matmul", few_rows_matmul);
  library.impl("few_rows_addmm", few_rows_addmm);
  impl_lookups</*records=*/false>(library);
}

TORCH_LIBRARY_IMPL(polycast_cpu, Meta, library) {
  using T = const Tensor&;
  library.impl("int8_linear", fake_linear<T, T, T, T, ScalarType, bool, int64_t>);
  library.impl("int8_matmul", fake_matmul<T, T, T, T, ScalarType, bool, int64_t>);
  library.impl("int8_addmm", fake_addmm<T, T, T, T, ScalarType, bool, int64_t>);
  library.impl("int8_conv1d", fake_conv<1, c10::SymIntArrayRef, T, T, T, ScalarType, bool, int64_t>);
  library.impl("int8_conv1d.padding", fake_conv<1, c10::string_view, T, T, T, ScalarType, bool, int64_t>);
  library.impl("int8_conv2d", fake_conv<2, c10::SymIntArrayRef, T, T, T, ScalarType, bool, int64_t>);
  library.impl("int8_conv2d.padding", fake_conv<2, c10::string_view, T, T, T, ScalarType, bool, int64_t>);
  library.impl("int4_linear", fake_linear<T, T, ScalarType, int64_t, int64_t>);
  library.impl("int4_matmul", fake_matmul<T, T, ScalarType, int64_t, int64_t>);
  library.impl("int4_addmm", fake_addmm<T, T, ScalarType, int64_t, int64_t>);
  library.impl("few_rows_linear", fake_linear<T, ScalarType, int64_t>);
  library.impl("few_rows_matmul", fake_matmul<T, ScalarType, int64_t>);
  library.impl("few_rows_addmm", fake_addmm<T, ScalarType, int64_t>);
}

// Of most ops nothing is recorded: skip torch's fallback, which would look for gradients.
TORCH_LIBRARY_IMPL(polycast_cpu, Autograd, library) {
  for (const char* op : {"int8_pack", "int8_linear", "int8_matmul", "int8_addmm", "int8_conv1d", "int8_conv1d.padding",
                         "int8_conv2d", "int8_conv2d.padding", "int4_pack", "int4_pack_levels", "int4_linear",
                         "int4_matmul", "int4_addmm", "few_rows_linear", "few_rows_matmul", "few_rows_addmm"}) {
    library.impl(op, torch::CppFunction::makeFallthrough());
  }
  impl_lookups</*records=*/true>(library);
}

}  // namespace polycast_cpu
