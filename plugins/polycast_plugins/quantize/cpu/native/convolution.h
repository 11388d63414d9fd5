// Convolutions of one and two axes as matrix products (im2col): a row of activations is the patch of one output pixel.
#pragma once

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "pack.h"
#include "product.h"
#include "quantize.h"
#include "tensors.h"
#include "transpose.h"

namespace polycast_cpu {

using Pair = std::array<int64_t, 2>;

// The padding before and after an image may differ: "same" may need more after it.
struct Convolution {
  Pair kernel, stride, before, after, dilation;
  int64_t groups;

  int64_t padded(int64_t size, int axis) const { return before[axis] + size + after[axis]; }

  int64_t output(int64_t size, int axis) const {
    return (padded(size, axis) - dilation[axis] * (kernel[axis] - 1) - 1) / stride[axis] + 1;
  }
};

// Images in bytes with their padding: [images, height, width, channels].
struct Images {
  at::Tensor bytes;
  int64_t count, height, width, channels;
};

// The bytes of patches that are multiplied at once, so that they stay in the cache.
constexpr int64_t kPatches = 1 << 21;

// Return the largest magnitude in each of the contiguous images.
template <typename T>
std::vector<uint32_t> magnitudes_of_images(Isa isa, const T* elements, int64_t images, int64_t parts, int64_t size) {
  std::vector<uint32_t> found(images * parts), largest(images);
  for_each_part(images * parts, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      found[part] = largest_magnitude(isa, elements + part * size, size);
    }
  });
  for (int64_t image = 0; image < images; ++image) {
    largest[image] = *std::max_element(found.begin() + image * parts, found.begin() + (image + 1) * parts);
  }
  return largest;
}

// Quantize images by their scales; one with scale 0 becomes zeros. `by_channel`: the input is contiguous, not channels_last.
template <typename T>
void quantize_images(Isa isa, const T* elements, bool by_channel, const std::vector<float>& scales,
                     const Convolution& convolution, const Images& out) {
  const Pair before = convolution.before, after = convolution.after;
  const int64_t channels = out.channels, line = out.width * channels;
  const int64_t height = out.height - before[0] - after[0], width = out.width - before[1] - after[1];
  uint8_t* const bytes = out.bytes.data_ptr<uint8_t>();
  for_each_part(out.count * out.height, grain(line), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> planes(by_channel ? width * channels : 0);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t image = row / out.height, y = row % out.height - before[0];
      const float scale = scales[image];
      uint8_t* const to = bytes + row * line;
      if (y < 0 || y >= height || scale == 0) {
        std::fill_n(to, line, kZeroPoint);
        continue;
      }
      std::fill_n(to, before[1] * channels, kZeroPoint);
      std::fill_n(to + (before[1] + width) * channels, after[1] * channels, kZeroPoint);
      uint8_t* const inner = to + before[1] * channels;
      if (by_channel) {
        for (int64_t channel = 0; channel < channels; ++channel) {
          quantize_row(isa, elements + ((image * channels + channel) * height + y) * width, width, 1 / scale,
                       planes.data() + channel * width);
        }
        transpose(planes.data(), channels, width, width, inner, channels);
      } else {
        quantize_row(isa, elements + (image * height + y) * width * channels, width * channels, 1 / scale, inner);
      }
    }
  });
}

// Write the patches of the output pixels [first, first + count) for a group, one in each row.
inline void gather(const Images& images, const Convolution& convolution, Pair output, int64_t group, int64_t first,
                   int64_t count, int64_t stride, uint8_t* out) {
  // Clang 15 cannot capture structured bindings.
  const Pair kernel = convolution.kernel, step = convolution.stride, dilation = convolution.dilation;
  const int64_t channels = images.channels, line = images.width * channels, in_group = channels / convolution.groups;
  // With dilation or groups the columns of the kernel are not adjacent.
  const int64_t pieces = dilation[1] == 1 && convolution.groups == 1 ? 1 : kernel[1];
  const int64_t piece = kernel[1] / pieces * in_group;
  const uint8_t* const bytes = images.bytes.const_data_ptr<uint8_t>() + group * in_group;
  for_each_part(count, grain(stride), [&](int64_t begin, int64_t end) {
    for (int64_t pixel = begin; pixel < end; ++pixel) {
      const int64_t place = first + pixel, x = place % output[1], y = place / output[1] % output[0];
      const int64_t image = place / output[1] / output[0];
      const uint8_t* from = bytes + (image * images.height + y * step[0]) * line + x * step[1] * channels;
      uint8_t* to = out + pixel * stride;
      for (int64_t row = 0; row < kernel[0]; ++row, from += dilation[0] * line) {
        for (int64_t part = 0; part < pieces; ++part, to += piece) {
          std::memcpy(to, from + part * dilation[1] * channels, piece);
        }
      }
    }
  });
}

// Call a function with each group: with several on all threads, with one here, whose own loops are on all threads.
template <typename Function>
void for_each_group(int64_t groups, int64_t cost, const Function& function) {
  if (groups == 1) {
    return function(0);
  }
  for_each_part(groups, grain(cost), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      function(group);
    }
  });
}

// Output pixels [first, first + count) of images that have so many.
struct Pixels {
  int64_t first, count, in_image;
};

// Copy products, a row of channels for each pixel, to the result, from the first of these channels of the first image on.
template <typename T>
void scatter(const T* products, int64_t stride, int64_t channels, Pixels pixels, int64_t all_channels, bool channels_last,
             T* result) {
  if (channels_last) {
    for (int64_t row = 0; row < pixels.count; ++row) {
      std::copy_n(products + row * stride, channels, result + (pixels.first + row) * all_channels);
    }
    return;
  }
  for (int64_t row = 0; row < pixels.count;) {  // for each image, or the part of it among these rows
    const int64_t image = (pixels.first + row) / pixels.in_image, pixel = (pixels.first + row) % pixels.in_image;
    const int64_t here = std::min(pixels.count - row, pixels.in_image - pixel);
    for_each_part(blocks(channels), grain(here * kBlock), [&](int64_t begin, int64_t end) {
      const int64_t channel = begin * kBlock, last = std::min(channels, end * kBlock);
      transpose(products + row * stride + channel, here, last - channel, stride,
                result + (image * all_channels + channel) * pixels.in_image + pixel, pixels.in_image);
    });
    row += here;
  }
}

// Return the convolution of an image with inf or nan, in float32 with the quantized weight.
inline at::Tensor convolve_nonfinite(const at::Tensor& image, const Weight& weight, const Convolution& convolution,
                                     const std::optional<at::Tensor>& bias) {
  const auto [kernel, stride, before, after, dilation, groups] = convolution;
  at::Tensor floats = at::empty({weight.columns, kernel[0], kernel[1], image.size(1) / groups}, at::kFloat);
  float* value = floats.data_ptr<float>();
  for (int64_t n = 0; n < weight.columns; ++n) {
    for (int64_t k = 0; k < weight.terms; ++k) {
      *value++ = weight.value(n, k) * weight.scales[n];
    }
  }
  const at::Tensor padded = at::constant_pad_nd(image.to(at::kFloat), {before[1], after[1], before[0], after[0]});
  return at::conv2d(padded, floats.permute({0, 3, 1, 2}), bias, stride, at::IntArrayRef{0}, dilation, groups);
}

// Return the part of a weight for a group, from the block on in which its first column is.
inline Weight weight_of_group(const Weight& weight, int64_t first, int64_t columns) {
  const int64_t number = first / kBlock, before = number * kBlock;
  return {weight.block(number), weight.scales + before, weight.offsets + before, first - before + columns, weight.terms};
}

// Return the format of the result as torch does, also for tensors that are in both formats. With one axis there is one format.
template <int Axes>
at::MemoryFormat convolution_format(const at::Tensor& images, const at::Tensor& weight) {
  const auto is_last = [](const at::Tensor& tensor) {
    return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  };
  return Axes == 2 && (is_last(images) || is_last(weight)) ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

// Return the convolution of images [B, C, H, W], in a format.
inline at::Tensor convolve_images(const at::Tensor& x, at::MemoryFormat format, const std::optional<at::Tensor>& bias,
                                  const Convolution& convolution, const at::Tensor& values, const at::Tensor& scales,
                                  const at::Tensor& offsets, at::ScalarType dtype, bool by_image, int64_t isa_number) {
  const auto isa = static_cast<Isa>(isa_number);
  const Pair kernel = convolution.kernel;
  const bool channels_last = format == at::MemoryFormat::ChannelsLast;
  const int64_t count = x.size(0), channels = x.size(1), height = x.size(2), width = x.size(3);
  const int64_t terms = kernel[0] * kernel[1] * channels / convolution.groups, columns = scales.size(0);
  const int64_t in_group = columns / convolution.groups;
  const Weight weight = weight_of(values, scales, offsets, terms);
  const Pair output{convolution.output(height, 0), convolution.output(width, 1)};
  const int64_t pixels = output[0] * output[1];
  TORCH_CHECK(x.numel() > 0 && columns > 0 && output[0] > 0 && output[1] > 0,
              "an int8 convolution expected images and an output with elements, got images ", x.sizes(), " and an output of ",
              output[0], " by ", output[1], ". Call torch's conv2d for these.");
  at::Tensor out = at::empty({count, columns, output[0], output[1]}, x.options().dtype(dtype), format);
  const bool by_channel = !x.is_contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor dense = by_channel ? x.contiguous() : x;
  const std::optional<at::Tensor> added = bias.has_value() ? std::optional(bias->to(at::kFloat).contiguous()) : bias;
  const float* const bias_values = bias.has_value() ? added->const_data_ptr<float>() : nullptr;

  Images images{{}, count, convolution.padded(height, 0), convolution.padded(width, 1), channels};
  images.bytes = at::empty({images.count * images.height * images.width * channels}, at::kByte);
  std::vector<float> image_scales(count);
  with_elements(dense, [&](const auto* elements) {
    const std::vector<uint32_t> magnitudes = magnitudes_of_images(isa, elements, count, height, width * channels);
    uint32_t largest = 0;
    for (uint32_t magnitude : magnitudes) {
      largest = is_finite(magnitude) ? std::max(largest, magnitude) : largest;
    }
    for (int64_t image = 0; image < count; ++image) {
      const uint32_t magnitude = magnitudes[image];
      image_scales[image] = is_finite(magnitude) ? scale_of(by_image ? magnitude : largest) : 0;
    }
    quantize_images(isa, elements, by_channel, image_scales, convolution, images);
  });

  const int64_t rows = count * pixels, row_bytes = row_stride(terms), groups = convolution.groups;
  const int64_t fitting = std::min(rows, kPatches / (row_bytes * groups));
  const int64_t at_once = std::max(kMaxRows, fitting / kMaxRows * kMaxRows + kMaxRows);
  const at::Tensor patches = at::empty({groups, at_once * row_bytes}, at::kByte);
  const at::Tensor row_scales = at::empty({at_once}, at::kFloat);
  float* const scale = row_scales.data_ptr<float>();
  with_elements(out, [&](auto* result) {
    using T = std::remove_pointer_t<decltype(result)>;
    const bool is_direct = channels_last && groups == 1;
    const at::Tensor parts = is_direct ? out : at::empty({groups, at_once, in_group + kBlock}, out.options());
    T* const part = static_cast<T*>(parts.data_ptr());
    for (int64_t first = 0; first < rows; first += at_once) {
      const int64_t now = std::min(at_once, rows - first);
      for (int64_t row = 0; row < now; ++row) {
        scale[row] = image_scales[(first + row) / pixels];
      }
      for_each_group(groups, now * row_bytes, [&](int64_t group) {
        uint8_t* const patch = patches.data_ptr<uint8_t>() + group * at_once * row_bytes;
        gather(images, convolution, output, group, first, now, row_bytes, patch);
        const Weight of_group = weight_of_group(weight, group * in_group, in_group);
        const int64_t skipped = of_group.columns - in_group;  // of the groups before, in the same block
        T* const products = is_direct ? result + first * columns : part + group * at_once * (in_group + kBlock);
        const float* const added_here = bias_values == nullptr ? nullptr : bias_values + group * in_group - skipped;
        product(isa, {patch, scale, now, row_bytes}, of_group, added_here, 0, products);
        if (!is_direct) {
          const Pixels of_rows{first, now, pixels};
          T* const to = result + group * in_group * (channels_last ? 1 : pixels);
          scatter(products + skipped, of_group.columns, in_group, of_rows, columns, channels_last, to);
        }
      });
    }
  });
  for (int64_t image = 0; image < count; ++image) {
    if (image_scales[image] == 0) {
      out.narrow(0, image, 1).copy_(convolve_nonfinite(dense.narrow(0, image, 1), weight, convolution, added));
    }
  }
  return out;
}

inline Convolution convolution_of(const at::Tensor& weight, Pair stride, Pair before, Pair after, Pair dilation,
                                  int64_t groups) {
  TORCH_CHECK(groups > 0 && weight.size(0) % groups == 0, "an int8 convolution expected a number of groups that divides ",
              weight.size(0), " output channels, got ", groups);
  TORCH_CHECK(std::min({stride[0], stride[1], dilation[0], dilation[1]}) > 0 &&
                  std::min({before[0], before[1], after[0], after[1]}) >= 0,
              "an int8 convolution expected a positive stride and dilation and no negative padding");
  return {{weight.size(2), weight.size(3)}, stride, before, after, dilation, groups};
}

inline Pair pair_of(at::IntArrayRef numbers) {
  TORCH_CHECK(numbers.size() == 1 || numbers.size() == 2, "expected one number or two, got ", numbers);
  return {numbers[0], numbers.back()};
}

// Images are [B, C, H, W] or [C, H, W]. Of the weight only sizes and strides are used.
template <int Axes>
at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const Convolution& convolution, const at::Tensor& values, const at::Tensor& scales,
                    const at::Tensor& offsets, at::ScalarType dtype, bool by_image, int64_t isa) {
  TORCH_CHECK(x.dim() == 3 || x.dim() == 4, "an int8 convolution expected images of 3 or 4 dimensions, got ",
              x.dim());
  const at::Tensor images = x.dim() == 4 ? x : x.unsqueeze(0);
  TORCH_CHECK(images.size(1) == weight.size(1) * convolution.groups, "an int8 convolution expected images of ",
              weight.size(1) * convolution.groups, " channels, got ", images.size(1));
  const at::Tensor out = convolve_images(images, convolution_format<Axes>(images, weight), bias, convolution, values,
                                         scales, offsets, dtype, by_image, isa);
  return x.dim() == 4 ? out : out.squeeze(0);
}

// A tensor of one axis has a height of 1.
inline at::Tensor with_height(const at::Tensor& tensor, int64_t axes) {
  return axes == 1 ? tensor.unsqueeze(-2) : tensor;
}

// The number of an axis, after that of the height if there is one axis.
template <int Axes>
Pair axes_of(at::IntArrayRef numbers, int64_t height) {
  return Axes == 1 ? Pair{height, pair_of(numbers)[0]} : pair_of(numbers);
}

// For one axis or two.
template <int Axes>
at::Tensor int8_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                     const at::Tensor& values, const at::Tensor& scales, const at::Tensor& offsets, at::ScalarType dtype,
                     bool by_image, int64_t isa) {
  const at::Tensor filters = with_height(weight, Axes);
  const Pair around = axes_of<Axes>(padding, 0);
  const Convolution convolution =
      convolution_of(filters, axes_of<Axes>(stride, 1), around, around, axes_of<Axes>(dilation, 1), groups);
  const at::Tensor out = convolve<Axes>(with_height(x, Axes), filters, bias, convolution, values, scales, offsets, dtype,
                                  by_image, isa);
  return Axes == 1 ? out.squeeze(-2) : out;
}

// `padding` is "same" or "valid".
template <int Axes>
at::Tensor int8_conv_padding(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                             at::IntArrayRef stride, c10::string_view padding, at::IntArrayRef dilation, int64_t groups,
                             const at::Tensor& values, const at::Tensor& scales, const at::Tensor& offsets,
                             at::ScalarType dtype, bool by_image, int64_t isa) {
  const at::Tensor filters = with_height(weight, Axes);
  const Pair steps = axes_of<Axes>(stride, 1), dilations = axes_of<Axes>(dilation, 1);
  Pair before{}, after{};
  if (padding == "same") {
    TORCH_CHECK(steps[0] == 1 && steps[1] == 1, "an int8 convolution with padding \"same\" needs a stride of 1, got ",
                stride);
    for (int axis = 0; axis < 2; ++axis) {
      const int64_t total = dilations[axis] * (filters.size(2 + axis) - 1);
      before[axis] = total / 2;
      after[axis] = total - total / 2;
    }
  }
  const Convolution convolution = convolution_of(filters, steps, before, after, dilations, groups);
  const at::Tensor out = convolve<Axes>(with_height(x, Axes), filters, bias, convolution, values, scales, offsets, dtype,
                                  by_image, isa);
  return Axes == 1 ? out.squeeze(-2) : out;
}

}  // namespace polycast_cpu
