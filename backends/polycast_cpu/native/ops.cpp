// The ops of this library: linear layers and convolutions with prepacked int8 weights.

#include <torch/library.h>

#include "conv2d.h"
#include "isa.h"
#include "linear.h"
#include "pack.h"

namespace polycast_cpu {

TORCH_LIBRARY(polycast_cpu, library) {
  library.def("best_isa() -> int", [] { return static_cast<int64_t>(best_isa()); });
  library.def("int8_pack(Tensor weight, int isa) -> Tensor[]");
  library.def(
      "int8_linear(Tensor x, Tensor values, Tensor scales, Tensor offsets, Tensor? bias, float alpha, bool by_row, "
      "ScalarType dtype, int isa) -> Tensor");
  library.def(
      "int8_conv2d(Tensor x, Tensor weight, Tensor values, Tensor scales, Tensor offsets, Tensor? bias, int[] stride, "
      "int[] padding, int[] dilation, bool by_image, ScalarType dtype, int isa) -> Tensor");
}

TORCH_LIBRARY_IMPL(polycast_cpu, CPU, library) {
  library.impl("int8_pack", int8_pack);
  library.impl("int8_linear", int8_linear);
  library.impl("int8_conv2d", int8_conv2d);
}

}  // namespace polycast_cpu
