"""Σ_h weight · relu(dot) of a piece: from the accumulator to the logits of each thread.

The accumulator is [64 keys, tokens · heads]. The four threads of a quad have the same two rows, i
and i + 8, and each of them two of every eight columns. A thread adds up its own columns, one sum
per row and token; then the quad exchanges sums such that each exchange halves what a thread holds,
until each has the logits of its own row or token.

All of it is one piece of PTX: a multiply-add per product, where the reduction of Triton 3.9 makes a
product and a tree of additions of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def logits_layout(tokens):
    """Return [64 keys, 1, 2 or 4 tokens]: a thread of a quad has one of four tokens in two rows, or
    one of two tokens in one row, or one row, which two threads share."""
    rows, warps = [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    if tokens == 4:
        registers, quad = [[8, 0]], [[0, 1], [0, 2]]
    elif tokens == 2:
        registers, quad = [], [[0, 1], [8, 0]]
    else:
        registers, quad = [], [[0, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, quad + rows, warps, [], [64, tokens])


@gluon.constexpr_function
def _sum_asm(tokens, heads, adds_odd):
    """PTX for all elements of a thread: results in $0 and, with four tokens, in $2. With one token
    they are the sums of half a quad.

    Of four elements two are in a row and two in the row 8 further down. A NaN stays one. With
    `adds_odd` the relu of odd columns is x + |x|, twice its value.
    """
    count = tokens * heads // 2
    lines = [
        ".reg .f32 term, kept, given, sum<8>;",
        ".reg .pred is_upper;",
        ".reg .b32 lane;",
        "mov.u32 lane, %laneid;",
    ]
    sums = [[f"sum{2 * token + row}" for row in (0, 1)] for token in range(tokens)]
    is_new = set()
    for i in range(count):
        dot, weight = f"${count + i}", f"${2 * count + i}"
        total = sums[i // (heads // 2)][i // 2 % 2]
        if adds_odd and i % 2:
            lines += [f"abs.f32 term, {dot};", f"add.f32 term, {dot}, term;"]
        else:
            lines.append(f"max.NaN.f32 term, {dot}, 0f00000000;")
        if total in is_new:
            lines.append(f"fma.rn.f32 {total}, term, {weight}, {total};")
        else:
            lines.append(f"mul.f32 {total}, term, {weight};")
            is_new.add(total)

    def exchange(bit, low, high):
        """low: what threads keep whose bit is 0, with the other thread's; high: of the others."""
        lines.extend(
            [
                f"selp.f32 kept, {high}, {low}, is_upper;",
                f"selp.f32 given, {low}, {high}, is_upper;",
                f"shfl.sync.bfly.b32 given, given, {bit}, 0x1f, 0xffffffff;",
                f"add.f32 {low}, kept, given;",
            ]
        )

    def choose(bit):
        lines.extend([f"and.b32 given, lane, {bit};", "setp.ne.b32 is_upper, given, 0;"])

    if tokens == 4:
        for bit, pairs in ((2, ((0, 2), (1, 3))), (1, ((0, 1),))):
            choose(bit)
            for low, high in pairs:
                for row in (0, 1):
                    exchange(bit, sums[low][row], sums[high][row])
        lines += [f"mov.f32 $0, {sums[0][0]};", f"mov.f32 $2, {sums[0][1]};"]
    else:
        choose(2)
        for pair in sums:
            exchange(2, *pair)
        if tokens == 2:
            choose(1)
            exchange(1, sums[0][0], sums[1][0])
        lines.append(f"mov.f32 $0, {sums[0][0]};")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _constraints(count):
    """Registers of the results, the products and the weights."""
    return ",".join(["=f"] * count + ["f"] * (2 * count))


@gluon.constexpr_function
def _log2(count):
    return count.bit_length() - 1


@gluon.jit
def sum_heads(acc, weights, TOKENS: gl.constexpr, ADDS_ODD: gl.constexpr):
    """Return [64 keys, TOKENS] of acc [64, TOKENS · heads] and weights [TOKENS · heads]; with
    ADDS_ODD those of odd heads are halved."""
    COLUMNS: gl.constexpr = acc.shape[1]
    COUNT: gl.constexpr = COLUMNS // 2
    GROUPS: gl.constexpr = COLUMNS // 8
    x = gl.inline_asm_elementwise(
        _sum_asm(TOKENS, COLUMNS // TOKENS, ADDS_ODD),
        _constraints(COUNT),
        [acc, gl.expand_dims(weights, 0).broadcast_to(acc.shape)],
        dtype=gl.float32,
        is_pure=True,
        pack=COUNT,
    )
    # the elements that hold results: [warps, rows 0 and 8, 8 rows, 4 threads]
    x, _ = gl.split(gl.reshape(x, [4, 2, 8, GROUPS, 4, 2]))
    for i in gl.static_range(_log2(GROUPS)):
        x = gl.reshape(x, [4, 2, 8, GROUPS >> (i + 1), 2, 4])
        x, _ = gl.split(gl.permute(x, (0, 1, 2, 3, 5, 4)))
    x = gl.reshape(x, [4, 2, 8, 4])
    if TOKENS < 4:
        x, _ = gl.split(gl.permute(x, (0, 2, 3, 1)))
        x = gl.permute(gl.reshape(x, [4, 8, 2, 2]), (0, 2, 1, 3))  # a bit of the thread is the row
    if TOKENS == 1:
        x = gl.sum(x, 3)
    return gl.convert_layout(
        gl.reshape(x, [64, TOKENS]), logits_layout(TOKENS), assert_trivial=True
    )
