# SPDX-License-Identifier: Apache-2.0
"""The parameters of torch's functions, and the names under which one op is known.

One line of `PARAMETERS` is for ops of the same parameters, in torch's order: `*` is behind an
operand (a tensor, a list of tensors, or a scalar in its place), `?` behind one that is a static
argument where no tensor is given, `...` behind one that takes all remaining positional arguments;
`|` is between names of one parameter, and the rule knows it by the first.
"""

__all__ = ["ALIASES", "COPIES", "PARAMETERS", "PREFIXES"]

PARAMETERS = """
linear: input* weight* bias*
bilinear: input1* input2* weight* bias*
matmul mm bmm mv dot outer inner kron: input* other|mat2|vec|vec2|tensor*
cdist: x1* x2* p compute_mode
addmm addmv addr baddbmm addbmm: input* mat1|mat|vec1|batch1* mat2|vec|vec2|batch2* beta alpha
einsum: equation operands*...
tensordot: a* b* dims
linalg_multi_dot: tensors*
chain_matmul broadcast_tensors: tensors|matrices*...
linalg_vecdot: x* y* dim
grouped_mm: mat_a* mat_b* offs* bias* out_dtype
layer_norm: input* normalized_shape weight* bias* eps
rms_norm: input* normalized_shape weight* eps
group_norm: input* num_groups weight* bias* eps
batch_norm: input* running_mean* running_var* weight* bias* training momentum eps
instance_norm: input* running_mean* running_var* weight* bias* use_input_stats momentum eps
softmax log_softmax softmin: input* dim _stacklevel dtype
normalize: input* p dim eps
sum nansum mean amax amin logsumexp argmax argmin all any nanmean: input* dim keepdim
prod: input* dim keepdim
count_nonzero: input* dim
var std var_mean std_mean: input* dim unbiased keepdim
max min: input* dim|other? keepdim
vector_norm norm_power: input* ord dim keepdim
__rmatmul__: input* other*
norm: input* p dim keepdim dtype
linalg_norm linalg_matrix_norm: input* ord dim keepdim
median nanmedian mode: input* dim keepdim
kthvalue: input* k dim keepdim
quantile nanquantile: input* q* dim keepdim
cumsum cumprod cummax cummin logcumsumexp: input* dim
diff: input* n dim prepend* append*
trapezoid: y* x* dx dim
cumulative_trapezoid: y* x* dx dim
dist: input* other* p
linear_cross_entropy: input* linear_weight* target*
topk: input* k dim largest sorted
sort argsort: input* dim descending
glu: input* dim
renorm: input* p dim maxnorm
searchsorted: sorted_sequence* input*
bucketize: input* boundaries*
unbind: input* dim
narrow: input* dim start length
select: input* dim index
select_scatter: input* src* dim index
slice_scatter: input* src* dim start end step
flip: input* dims...
roll: input* shifts dims
rot90: input* k dims
__getitem__: input* index
index_select: input* dim index*
gather: input* dim index*
take_along_dim: input* index|indices* dim
take: input* index*
isin: elements* test_elements*
scatter scatter_add: input* dim index* src|value*
scatter_reduce: input* dim index* src* reduce
index_add index_copy index_fill: input* dim index* src|source|value*
index_reduce: input* dim index* src|source* reduce
index_put: input* indices* values* accumulate
transpose: input* dim0|axis0 dim1|axis1
t mT mH: input*
movedim: input* source destination
permute: input* dims...
view reshape: input* shape...
expand: input* sizes...
repeat: input* repeats...
tile: input* dims...
repeat_interleave: input* repeats dim output_size
flatten: input* start_dim end_dim
unflatten: input* dim sizes...
unsqueeze squeeze: input* dim
diagonal diag_embed: input* offset dim1 dim2
linalg_diagonal: A* offset dim1 dim2
unfold: input* dimension size step
cat stack: tensors* dim
hstack vstack dstack column_stack: tensors*
meshgrid atleast_1d atleast_2d atleast_3d: tensors*...
split: input* split_size|split_size_or_sections|split_sizes dim
chunk: input* chunks dim
tensor_split: input* indices_or_sections|sections|indices dim
hsplit vsplit dsplit: input* indices_or_sections|sections|indices
embedding: input* weight* padding_idx max_norm norm_type scale_grad_by_freq sparse
scaled_dot_product_attention: query* key* value* attn_mask* dropout_p is_causal scale enable_gqa
cross_entropy: input* target* weight* size_average ignore_index reduce reduction label_smoothing
nll_loss: input* target* weight* size_average ignore_index reduce reduction
mse_loss l1_loss: input* target* size_average reduce reduction weight*
smooth_l1_loss: input* target* size_average reduce reduction beta
huber_loss: input* target* reduction delta weight*
kl_div: input* target* size_average reduce reduction log_target
poisson_nll_loss: input* target* log_input full size_average eps reduce reduction
gaussian_nll_loss: input* target* var* full eps reduction
soft_margin_loss multilabel_margin_loss: input* target* size_average reduce reduction
hinge_embedding_loss: input* target* margin size_average reduce reduction
margin_ranking_loss cosine_embedding_loss: input1* input2* target* margin size_average reduce
    reduction
binary_cross_entropy multilabel_soft_margin_loss: input* target* weight* size_average reduce
    reduction
binary_cross_entropy_with_logits: input* target* weight* size_average reduce reduction pos_weight*
multi_margin_loss: input* target* p margin weight* size_average reduce reduction
triplet_margin_loss: anchor* positive* negative* margin p eps swap size_average reduce reduction
pairwise_distance: x1* x2* p eps keepdim
cosine_similarity: x1* x2* dim eps
conv1d conv2d conv3d: input* weight* bias* stride padding dilation groups
conv_transpose1d conv_transpose2d conv_transpose3d: input* weight* bias* stride padding
    output_padding groups dilation
pad: input* pad mode value
pixel_shuffle: input* upscale_factor
pixel_unshuffle: input* downscale_factor
grid_sample: input* grid* mode padding_mode align_corners
linalg_solve linalg_solve_triangular: A* B*
cholesky_solve: B* L|input2*
triangular_solve: b* A*
cross linalg_cross: input* other* dim
linalg_qr: A* mode
qr: input* some
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft: input* n dim norm
fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2: input* s dim norm
fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn: input* s dim norm
stft: input* n_fft hop_length win_length window* center pad_mode normalized onesided return_complex
istft: input* n_fft hop_length win_length window* center normalized onesided length return_complex
fft_fftshift fft_ifftshift: input* dim
where: condition* input|self* other*
lerp: input* end* weight*
addcmul addcdiv: input* tensor1* tensor2*
add sub mul maximum minimum eq ne lt le gt ge fmod remainder: input* other*
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor: input* other*
atan2 floor_divide rdiv copysign float_power fmax fmin gcd lcm heaviside hypot: input*
    other|exponent|values*
igamma igammac logaddexp logaddexp2 nextafter xlogy xlog1py zeta ldexp isclose: input* other*
bitwise_left_shift bitwise_right_shift: input* other*
complex polar: real|abs* imag|angle*
div: input* other* rounding_mode
npu_rms_norm: x|self* gamma* epsilon
npu_add_rms_norm: x1* x2* gamma* epsilon
npu_rotary_mul: input|self* r1* r2* rotary_mode
npu_swiglu: input|self* dim
npu_linear: input* weight* bias*
npu_scaled_masked_softmax: x* mask* scale fixed_triu_mask
npu_fusion_attention: query* key* value* head_num input_layout pse* padding_mask*
    atten_mask* scale keep_prob
npu_moe_token_unpermute: permuted_tokens* sorted_indices* probs* padded_mode restore_shape
pow: input* exponent*
fill: input* value*
masked_fill: input* mask* value*
dropout alpha_dropout dropout1d dropout2d dropout3d: input* p training inplace
clamp: input* min* max*
clamp_min clamp_max: input* limit|min|max*
prelu: input* weight*
one_hot: input* num_classes
gelu: input* approximate
elu leaky_relu hardtanh softplus: input* first second third
"""

_SAME = "eq ne lt le gt ge add sub mul matmul pow"
ALIASES = {
    **{f"__{name}__": name for name in _SAME.split()},
    **{
        pair.partition("=")[0]: pair.partition("=")[2]
        for pair in """
__and__=bitwise_and __or__=bitwise_or __xor__=bitwise_xor __invert__=bitwise_not
__rand__=bitwise_and __ror__=bitwise_or __rxor__=bitwise_xor __lshift__=bitwise_left_shift
__rshift__=bitwise_right_shift __rsub__=sub __rmul__=mul __radd__=add __rdiv__=rdiv
__rtruediv__=rdiv __rpow__=pow __floordiv__=floor_divide __rfloordiv__=floor_divide
__mod__=remainder __rmod__=remainder __truediv__=div __div__=div __neg__=neg __abs__=abs
__pos__=positive rsub=sub subtract=sub multiply=mul divide=div true_divide=div negative=neg
absolute=abs arccos=acos arccosh=acosh arcsin=asin arcsinh=asinh arctan=atan arctanh=atanh
arctan2=atan2 clip=clamp fix=trunc greater=gt greater_equal=ge less=lt less_equal=le not_equal=ne
expit=sigmoid gammaln=lgamma psi=digamma gammainc=igamma gammaincc=igammac log_sigmoid=logsigmoid
swapaxes=transpose swapdims=transpose moveaxis=movedim adjoint=mH ger=outer vdot=dot
row_stack=vstack concat=cat concatenate=cat type=to T=t H=t inverse=linalg_inv pinverse=linalg_pinv
det=linalg_det slogdet=linalg_slogdet cholesky=linalg_cholesky matrix_exp=linalg_matrix_exp
linalg_matmul=matmul linalg_vector_norm=vector_norm constant_pad_nd=pad unsafe_split=split
unsafe_chunk=chunk split_with_sizes=split multigammaln=mvlgamma
_threshold=threshold trapz=trapezoid fold=col2im _grouped_mm=grouped_mm
""".split()
    },
}
# The op behind a prefix, and what also exists as NAME_copy, is the op itself.
PREFIXES = ("special_",)
COPIES = frozenset(
    "alias diagonal expand narrow permute split_with_sizes squeeze t transpose unbind unfold"
    " unsqueeze view".split()
)
