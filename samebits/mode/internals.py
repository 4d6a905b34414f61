"""Operators that are reported, and that no function of :mod:`samebits.mode.rules` leads to.

Models reach them through quantised modules, or call them by name. They are patterns of qualified names, in
all namespaces of PyTorch's: a new operator that sums is reported as soon as its name fits. What fits none of
these and has no rule is in the list of ``tests/mode/judged.py``, with the reason why it is safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

import torch
from torch._ops import OpOverload

__all__ = [
    "ELEMENTWISE_GRADIENTS",
    "MOVING_GRADIENTS",
    "PATTERNS",
    "fits",
    "is_composite",
    "operator",
    "reported",
]

_GRADIENTS = "gradients of products, reductions, convolutions and norms"
PATTERNS = {
    "quantised products, norms and statistics": """
        quantized::* _quantized::* onednn::* sparse::q* aten::quantized_* aten::fbgemm_linear_*
        aten::_wrapped_quantized_linear* aten::_weight_int* aten::_dyn_quant_matmul_4bit
        aten::_mixed_dtypes_linear aten::quantize_per_tensor_dynamic aten::_choose_qparams_per_tensor
        aten::choose_qparams_optimized aten::_fused_moving_avg_obs_fq_helper*
        aten::_fake_quantize_learnable_*
    """,
    "products of other libraries": """
        mkl::* mkldnn::* mkldnn_prepacked::* prepacked::*
        aten::mkldnn_* aten::cudnn_* aten::_cudnn_* aten::miopen_*
        aten::*mps_* aten::_nnpack_* _native::* inductor::_mm_plus_mm
        symm_mem::_async_input_mm static_runtime::embedding_bag static_runtime::layer_norm
    """,
    "products": """
        aten::_addmm_activation aten::_foreach_mm aten::_trilinear aten::_compute_linear_combination
        aten::_euclidean_dist aten::_cdist_forward aten::_pdist_forward aten::*_thnn_* aten::_fused_rms_norm
    """,
    "sparse products and sums": """
        aten::hspmm aten::sspaddmm aten::smm aten::_spsolve aten::sparse_sampled_addmm aten::_sparse_csr_sum
        aten::_sparse_csr_prod aten::_sparse_mm_reduce_impl* aten::_sparse_sparse_matmul
        aten::_sparse_semi_structured_*mm aten::_sparse_semi_structured_linear aten::_cslt_sparse_mm
    """,
    "softmax, norms and statistics": """
        aten::_masked_softmax aten::_nested_tensor_softmax_with_shape aten::_weight_norm_interface
        aten::native_norm aten::embedding_renorm aten::embedding_renorm_ aten::_batch_norm_*
        aten::_native_batch_norm_* aten::batch_norm_*
    """,
    "convolutions and pooling": """
        aten::*conv_depthwise* aten::slow_conv* aten::_slow_conv* aten::convolution_overrideable
        aten::_adaptive_avg_pool* aten::_grid_sampler_2d_cpu_fallback
    """,
    "attention": """
        aten::_triton_* aten::_flash_attention_* aten::_efficient_attention_* aten::_scaled_dot_product_*
    """,
    "sums of other kinds": """
        aten::_ctc_loss aten::_embedding_bag* aten::_logcumsumexp aten::_foreach_powsum aten::addr_
        aten::_histogramdd_from_bin_tensors aten::multi*_margin_loss_*
        aten::_cholesky_solve_helper
    """,
    _GRADIENTS: "aten::*_backward aten::*_backward_*",
}
"""Groups of patterns."""

# What they are not meant for.
ELEMENTWISE_GRADIENTS = """
    aten::elu_backward aten::*gelu_backward aten::glu_backward* aten::hard*_backward aten::leaky_relu_backward
    aten::log_sigmoid_backward aten::logit_backward aten::mish_backward aten::sigmoid_backward
    aten::silu_backward aten::soft*_backward aten::tanh_backward aten::threshold_backward
    aten::_prelu_kernel_backward aten::native_dropout_backward aten::rrelu_with_noise_backward
    aten::binary_cross_entropy_backward aten::mse_loss_backward aten::smooth_l1_loss_backward
    aten::huber_loss_backward aten::nll_loss_backward aten::nll_loss2d_backward
    aten::fake_quantize_*_cachemask_backward
"""
MOVING_GRADIENTS = """
    aten::diagonal_backward aten::select_backward aten::slice_backward aten::unfold_backward
    aten::masked_scatter_backward aten::_nested_select_backward aten::_nested_sum_backward
    aten::max_pool2d_backward aten::max_pool?d_with_indices_backward aten::adaptive_max_pool?d_backward
    aten::fractional_max_pool?d_backward aten::re*_pad?d_backward
"""
_PREPARES = """
    *::*prepack* *::*_unpack *::*_unpack_fp16 *::*_unpack_sizes *::*_reorder_* *::*::cat*
    *::make_quantized_cell_params* mkldnn::_is_* mkldnn::_nbytes mkldnn::data_ptr mkldnn::_get_*
    quantized::conv*_stride quantized::conv*_padding quantized::conv*_dilation quantized::conv*_groups
    quantized::conv*_transpose quantized::conv*_output_padding aten::cudnn_is_acceptable
    aten::_cudnn_init_dropout_state aten::_cudnn_rnn_flatten_weight aten::_use_cudnn_rnn_flatten_weight
    quantized::cat* quantized::max_pool* aten::quantized_max_pool* _quantized::wrapped_fbgemm_pack_*
    quantized::int4mm_packed_weight_cpu aten::_nnpack_available aten::_nested_* aten::_convert_weight_*
"""


def fits(patterns: str) -> re.Pattern[str]:
    """Qualified names that fit one of these patterns, which spaces divide."""
    return re.compile("|".join(map(translate, patterns.split())))


_LEFT = fits(f"{_PREPARES} {ELEMENTWISE_GRADIENTS} {MOVING_GRADIENTS}")
_SUMS = fits(" ".join(patterns for group, patterns in PATTERNS.items() if group != _GRADIENTS))
_ANY = fits(" ".join(PATTERNS.values()))


def is_composite(op: OpOverload) -> bool:
    """Whether it only calls other operators, with autograd too."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def operator(full: str) -> OpOverload:
    """The operator with this qualified name, such as ``aten::add.Tensor``."""
    namespace, _, rest = full.partition("::")
    name, _, overload = rest.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    return found


def reported() -> Iterator[OpOverload]:
    """The operators that fit a pattern of :data:`PATTERNS`."""
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name = full.partition(".")[0]
        if _ANY.fullmatch(name) and not _LEFT.fullmatch(name):
            op = operator(full)
            if _SUMS.fullmatch(name) or not is_composite(op):
                yield op
