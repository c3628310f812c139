"""The text that renderers print for one small kernel, written by hand: what is in it and, as important, what
is not."""

from __future__ import annotations

from tests.runtime.linear_kernels import Kernel
from whit.renderer import c, llvm
from whit.uop import Ops, UOp, dtypes

LLVM = """\
define void @"twice"(ptr noalias readonly %buffers, ptr noalias readonly %variables, i64 %thread) #0 {
entry:
  %p0.at = getelementptr ptr, ptr %buffers, i64 0
  %p0 = load ptr, ptr %p0.at
  %p1.at = getelementptr ptr, ptr %buffers, i64 1
  %p1 = load ptr, ptr %p1.at
  br label %loop2_0
loop2_0:
  %i_loop2_0 = phi i64 [ 0, %entry ], [ %i_loop2_0.next, %loop2_0.latch ]
  %v1 = mul nsw i64 %i_loop2_0, 4
  %v2 = getelementptr inbounds float, ptr %p1, i64 %v1
  %v3 = load <4 x float>, ptr %v2, align 4, !alias.scope !5, !noalias !6
  %v4 = fadd <4 x float> %v3, %v3
  %v5 = getelementptr inbounds float, ptr %p0, i64 %v1
  store <4 x float> %v4, ptr %v5, align 4, !alias.scope !3, !noalias !4
  br label %loop2_0.latch
loop2_0.latch:
  %i_loop2_0.next = add nuw nsw i64 %i_loop2_0, 1
  %i_loop2_0.done = icmp eq i64 %i_loop2_0.next, 8
  br i1 %i_loop2_0.done, label %loop2_0.end, label %loop2_0
loop2_0.end:
  ret void
}
"""
C = """\
typedef f32 f32x4 __attribute__((vector_size(16)));
typedef f32 f32x4_ __attribute__((vector_size(16), aligned(4), may_alias));
void twice(void *const *buffers, const i64 *variables, i64 thread) {
  f32 *const restrict p0 = buffers[0];
  f32 *const restrict p1 = buffers[1];
  for (i64 n1 = 0; n1 < 8LL; n1++) {
    const i64 v2 = n1 * 4LL;
    const f32x4 v3 = *(const f32x4_ *)(p1 + v2);
    const f32x4 v4 = v3 + v3;
    *(f32x4_ *)(p0 + v2) = v4;
  }
}
"""


def twice() -> UOp:
    kernel = Kernel()
    out, a = kernel.param(0, dtypes.float32), kernel.param(1, dtypes.float32)
    loop = kernel.range(8)
    index = kernel.alu(Ops.MUL, loop, kernel.const(4))
    value = kernel.load(a, index, 4)
    kernel.store(out, index, kernel.alu(Ops.ADD, value, value))
    kernel.end(loop)
    return kernel.linear()


def test_llvm_text() -> None:
    text = llvm.render(twice(), "twice")
    assert text.startswith(LLVM)
    for flag in ("fast", "nnan", "ninf", "nsz", "reassoc", "contract"):
        assert flag not in text
    assert '"no-builtins"' in text


def test_c_text() -> None:
    assert c.render(twice(), "twice").endswith(C)


def test_rendering_is_repeatable() -> None:
    """Equal programs give equal text: the disk cache and VALIDATE rely on it."""
    assert llvm.render(twice(), "k") == llvm.render(twice(), "k")
    assert c.render(twice(), "k") == c.render(twice(), "k")
