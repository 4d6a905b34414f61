"""Why each operator of PyTorch's that has no rule in the mode gives a row the same bits in every batch.

A group is a rule that a program can check, or patterns of qualified names with a reason. An operator that is
in no group fails ``test_every_operator_was_judged``: judge it, then give it a rule in ``samebits/mode/``, or
write it here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from samebits.mode.internals import ELEMENTWISE_GRADIENTS, MOVING_GRADIENTS, fits, is_composite

_fits = functools.cache(fits)  # thousands of operators are asked about


class Rule(NamedTuple):
    """Operators of one kind, which a function recognises."""

    reason: str
    holds: Callable[[OpOverload], bool]


class Names(NamedTuple):
    """Operators that fit patterns."""

    reason: str
    patterns: str

    def holds(self, op: OpOverload) -> bool:
        return bool(_fits(self.patterns).fullmatch(op._schema.name))


def _takes_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(a.type) for a in op._schema.arguments)


def _returns_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(r.type) for r in op._schema.returns)


def is_elementwise(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or ELEMENTWISE.holds(op)


ELEMENTWISE = Names(
    "elementwise, and the same in PyTorch's vectors as after them: `test_elementwise_operators_...` compares",
    """
    aten::*lshift__ aten::*rshift__ aten::_add_relu* aten::bitwise_* aten::copysign* aten::eq* aten::ne*
    aten::g[et] aten::g[et]_ aten::l[et] aten::l[et]_ aten::gcd_ aten::lcm_ aten::heaviside_ aten::isinf
    aten::isnan aten::hard* aten::leaky_relu* aten::masked_fill* aten::relu aten::remainder aten::threshold*
    aten::where aten::complex aten::glu_jvp aten::_prelu_kernel aten::log_sigmoid_forward
    aten::fill aten::fill_ aten::_masked_scale aten::_transform_bias_rescale_qkv aten::_standard_gamma_grad
    aten::_dirichlet_grad aten::quantize_per_tensor aten::quantize_per_channel aten::dequantize
    aten::fake_quantize_*_cachemask* aten::_conj_physical
    """
    + ELEMENTWISE_GRADIENTS,
)

GROUPS = (
    Rule("composed of operators that are judged themselves", is_composite),
    Rule("a view of its argument", lambda op: op.is_view and not op._schema.is_mutable),
    Rule("makes a tensor of numbers alone", lambda op: not _takes_tensors(op)),
    Rule(
        "returns no tensor and writes none: sizes, facts, packed weights",
        lambda op: not _returns_tensors(op) and not op._schema.is_mutable,
    ),
    Rule("draws random numbers", lambda op: torch.Tag.nondeterministic_seeded in op.tags),
    Rule(ELEMENTWISE.reason, is_elementwise),
    Rule(
        "a list of tensors, by the operators of one",  # `test_lists_...` compares
        lambda op: op._schema.name.startswith("aten::_foreach_"),
    ),
    Names(
        "copies, moves or selects values",
        """
        aten::*_copy aten::*_scatter aten::copy* aten::clone aten::cat aten::stack aten::_stack
        aten::_chunk_cat aten::block_diag aten::channel_shuffle aten::constant_pad_nd aten::*_pad?d
        aten::diag_embed aten::flip aten::roll aten::rot90 aten::gather aten::index aten::index_copy*
        aten::index_fill* aten::index_select aten::masked_scatter* aten::masked_select aten::narrow_copy
        aten::pixel_*shuffle aten::repeat aten::repeat_interleave aten::take aten::tri[lu] aten::tri[lu]_
        aten::unsafe_split* aten::_unsafe_index aten::_unsafe_masked_index aten::_unsafe_view aten::im2col
        aten::lu_unpack aten::_pack_padded_sequence aten::_to_copy aten::_copy_from* aten::_lazy_clone
        aten::lift aten::_pin_memory aten::to_padded_tensor aten::_jagged_to_padded_dense_forward
        aten::_padded_dense_to_jagged_forward aten::as_strided_ aten::squeeze_ aten::unsqueeze_ aten::t_
        aten::transpose_ aten::detach_ aten::set aten::set_ aten::shallow_copy_data_ aten::resize*
        aten::_resize_output* aten::zero aten::zero_ aten::_coalesced* inductor::_reinterpret_tensor
        export::access_subclass_inner_tensor quantized::cat* static_runtime::*_copy
        static_runtime::to_*copy_out
        """,
    ),
    Names(
        "the gradient of such a one: on a CPU, what windows share is added in the order of its row;"
        " docs/mode.md says what a GPU adds in any order",
        MOVING_GRADIENTS,
    ),
    Names(
        "selects by comparing: the result is one of the values, or its place",
        """
        aten::amax aten::amin aten::aminmax aten::_aminmax aten::max aten::min aten::median aten::nanmedian
        aten::mode aten::kthvalue aten::argmax aten::argmin aten::cummax aten::cummin aten::_cumm??_helper
        aten::*max_pool* aten::max_unpool?d quantized::max_pool?d aten::_unique* aten::unique_*
        aten::_histogramdd_bin_edges
        """,
    ),
    Names(
        "integers and truth values, which sum exactly",
        """
        aten::all aten::any aten::_is_a??_true aten::bucketize aten::searchsorted aten::count_nonzero
        aten::histc aten::isin aten::nonzero aten::nonzero_static aten::hash_tensor aten::_int_mm
        aten::_amp_foreach_non_finite_check_and_unscale* aten::_amp_update_scale*
        """,
    ),
    Names(
        "makes a tensor from the shape of another, or from numbers",
        """
        aten::*empty* aten::full* aten::ones* aten::zeros* aten::new_* aten::_new_zeros_* aten::arange
        aten::range aten::linspace aten::logspace aten::eye aten::*_window aten::tri[lu]_indices
        aten::scalar_tensor aten::from_file aten::_efficientzerotensor
        """,
    ),
    Names("random numbers from a key: they depend on the key alone", "aten::_philox_*"),
    Names(
        "the loss of a batch, whose value belongs to the batch",
        """
        aten::mse_loss aten::huber_loss aten::smooth_l1_loss aten::soft_margin_loss
        aten::binary_cross_entropy aten::nll_loss_forward aten::nll_loss2d_forward
        """,
    ),
    Names(
        "composed of operators that have a rule, though not for autograd",
        "aten::_safe_softmax aten::affine_grid_generator aten::_index_put_impl aten::_unsafe_index_put"
        " aten::_unsafe_masked_index_put_accumulate aten::put aten::_fused_ada* aten::_fused_sgd prims::*",
    ),
    Names(
        "packs, unpacks and describes operands",
        """
        *::*prepack* *::*_unpack *::*_unpack_fp16 *::*_reorder_* quantized::int4mm_packed_weight_cpu
        _quantized::wrapped_fbgemm_pack_* aten::_convert_weight_* aten::_dyn_quant_pack_*
        aten::_cudnn_rnn_flatten_* mkldnn::_get_* aten::to_mkldnn aten::_mkldnn_* aten::q_per_channel_*
        aten::int_repr aten::_make_per_*_quantized_tensor
        aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        """,
    ),
    Names(
        "makes, converts and describes sparse and nested tensors",
        """
        aten::_nested_* aten::*sparse_coo_* aten::sparse_compressed_tensor aten::sparse_mask
        aten::sparse_resize* aten::_sparse_mask_projection aten::_sparse_semi_structured_apply*
        aten::_sparse_semi_structured_tile aten::_to_sparse* aten::_to_dense aten::_spdiags aten::_coalesce
        aten::_cslt_compress aten::_convert_indices_*
        """,
    ),
    Names("checks and marks", "aten::_functional_* aten::record_stream"),
    Names(
        "exchanges between ranks: sums in a fixed order are those of `samebits.distributed`",
        "c10d::* _c10d_functional::* _c10d_functional_autograd::* _dtensor::* symm_mem::*",
    ),
    Names("adds up gradients for the compiler, as autograd does", "inductor::accumulate_grad_"),
    Names("elementwise, for TorchScript's own runtime", "static_runtime::*"),
    Names("converts numbers", "quantization::*"),
    Names("PyTorch's own tests", "aten::_test_* _test::* aten::_foobar"),
)
