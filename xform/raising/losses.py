"""Cross-entropy over a vocabulary, found from the logarithm of a sum of exponentials of logits.

    z = x @ w
    p = log_softmax(z)
    loss = -take_along_axis(p, labels[:, None], 1)      ->      loss = cross_entropy x w labels

Where the logits are is `vocabulary`'s. Then all values of one number a token that follow from the product are
evaluated, for made-up logits and labels, and each is fitted (`entropies`) as a sum of the log-sum-exp, its
square, the label's logit, the mean of logits and a constant: that says what it is, in whatever way the
label's logit is picked, smoothed or masked by comparing. Labels are the integers, one a token, that such a
value depends on alone besides logits; or where there are none, an array of floats as large as the logits.
What is fitted agrees to 1e-7, in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xform.raising.elementwise import is_elementwise
from xform.raising.entropies import Fit, Fits, tidy
from xform.raising.flat import View, size
from xform.raising.following import cone, ends_in, kind, read, static
from xform.raising.indices import MOVEMENT
from xform.raising.meaning import CrossEntropy, Near, Raised, Tensor
from xform.raising.points import Points, Unknown
from xform.raising.vocabulary import Logits, Other, has_own_rule, is_table, logits
from xform.trace import Atom, Literal, Var

OP = "cross_entropy"


def losses(view: View) -> Iterator[Raised | Near]:
    """The cross-entropies of a body, one for each product that makes logits, and what nearly are."""
    known = static(view, arrays=False)
    done: set[Var] = set()
    for number, eqn in enumerate(view.eqns):
        if has_own_rule(view, number, known):
            yield Near(OP, "its derivative is its own (a custom_vjp), and could be another", view, number)
        if eqn.primitive.name not in ("exp", "exp2"):
            continue
        try:
            found = logits(view, number, known)
            if found is None or found.product in done:
                continue
            raised = _Head(found, known).loss()
            if raised is not None:
                done.add(found.product)
                yield raised
        except Other as why:
            yield Near(OP, str(why), view, number)


class _Head:
    """The logits of one product, and the values that follow from them."""

    def __init__(self, found: Logits, known: frozenset[Var]) -> None:
        self.view, self.z, self.known = found.view, found, known
        self.fits = Fits(found, known)

    def loss(self) -> Raised | None:
        fits = list(self.fits.tokens())
        out = self._out([f for f in fits if f.is_loss])
        lses, owns = [f for f in fits if f.is_lse], [f for f in fits if f.is_own]
        if out is None:
            out = self._summed()
        if out is not None:
            return self._raised(out, lses, [f for f in owns if f.labels is out.labels])
        if lses and owns and self._are_parted(lses[0].out, owns[0].out):
            return self._raised(None, lses, owns)
        return None

    def _are_parted(self, lse: Var, own: Var) -> bool:
        """Whether what follows from both is first brought together as a difference."""
        above, below = cone(self.view, lse), cone(self.view, own)
        for eqn in self.view.eqns:
            signs = [_signs(self.view, v, lse, above, own, below) for v in eqn.invars]
            found = [s for s in signs if s is not None]
            if len(found) == len(signs) == 2:
                (a, b), (c, d) = found
                if (a and d and not b and not c) or (b and c and not a and not d):
                    difference = (a or b) * (c or d) * (-1 if eqn.primitive.name == "sub" else 1)
                    return eqn.primitive.name in ("add", "sub") and difference < 0
        return False

    # ------------------------------------------------------------ which is the loss

    def _out(self, fits: Sequence[Fit]) -> Fit | None:
        """The last value that is the loss, as far as what comes before is used for it alone."""
        found: Fit | None = None
        for fit in fits:
            alike = found is None or (fit.labels, fit.outside) == (found.labels, found.outside)
            if found is None or (alike and ends_in(self.view, found.out, fit.out)):
                found = fit
        return found

    def _summed(self) -> Fit | None:
        """A sum over the vocabulary and over tokens at once."""
        for eqn in self.view.eqns:
            if eqn.primitive.name != "reduce_sum":
                continue
            y, out = eqn.invars[0], eqn.outvars[0]
            if isinstance(y, Literal) or y not in self.z.inside or size(y) != size(self.z.exponent):
                continue
            if self.z.axis not in eqn.params["axes"]:
                continue
            fit = self.fits.fit(y, over=True)
            if fit is not None and fit.is_loss:
                return dataclasses.replace(fit, out=out, summed=True)
        return None

    # ------------------------------------------------------------ the answer

    def _raised(self, out: Fit | None, lses: Sequence[Fit], owns: Sequence[Fit]) -> Raised:
        view, z = self.view, self.z
        said = out or owns[0]
        assert said.labels is not None
        if not is_table(z, said.labels):
            raise Other("both operands of its logits are computed from data: its table is no weight")
        ends = {v for v in (z.x, z.w, z.bias, said.labels) if isinstance(v, Var)}

        def needed(*results: Var) -> set[int]:
            return view.ancestors(results, stop=lambda v: v in ends)

        numbers = needed(out.out) if out is not None else needed(lses[0].out, owns[0].out)
        if out is not None:
            self._check(out)
        lse = self._besides(lses, numbers) if out is not None else lses[0].out
        own = self._besides(owns, numbers) if out is not None else owns[0].out
        numbers |= needed(*(v for v in (lse, own) if v is not None))
        results = [v for v in (None if out is None else out.out, lse, own) if v is not None]
        used = self._used(numbers)
        kept = None if out is None else self._kept(out)
        sign = 1.0 if out is None else out.lse
        meaning = CrossEntropy(
            Tensor(z.x, z.x_dims), Tensor(z.w, z.w_dims), Tensor(said.labels, self._label_dims(said)),
            None if out is None or kept is None else Tensor(out.out, kept),
            z.cap, z.scale, z.bias,
            smoothing=0.0 if out is None or out.soft else tidy(-out.mean * sign),
            z_loss=0.0 if out is None else tidy(out.square * sign),
            offset=0.0 if out is None else tidy(out.constant * sign),
            valid=None if z.valid == z.vocab else z.valid,
            soft=said.soft, negative=sign < 0, summed=out is not None and out.summed,
            lse=self._tensor(lse), picked=self._tensor(own), part=z.part,
            outside=said.outside, logits_used=used,
        )  # fmt: skip
        note = "its logits are used elsewhere too" if used else ""
        number = max(view.makers[v] for v in results)
        return Raised(OP, view, number, frozenset(numbers), meaning, dict(z.sizes), note)

    def _tensor(self, v: Var | None) -> Tensor | None:
        if v is None:
            return None
        return Tensor(v, self._dims(size(v)))

    def _dims(self, shape: Sequence[int]) -> tuple[str, ...]:
        dims = self.z.dims(shape)
        if dims is None:
            raise Other("its labels or its losses lie in another shape than its tokens")
        return dims

    def _label_dims(self, fit: Fit) -> tuple[str, ...]:
        assert fit.labels is not None
        if not fit.soft:
            return self._dims(size(fit.labels))
        wide = list(self.z.letters)
        wide.insert(self.z.axis, "v")
        names = iter([c for c, n in zip(wide, size(self.z.exponent), strict=True) if n > 1])
        return tuple(next(names) if n > 1 else "" for n in size(fit.labels))

    def _kept(self, fit: Fit) -> tuple[str, ...]:
        """The dimensions of the loss: of all tokens, or those that it was not summed over."""
        if not fit.summed:
            return self._dims(size(fit.out))
        eqn = self.view.maker(fit.out)
        assert eqn is not None
        wide = list(self.z.letters)
        wide.insert(self.z.axis, "v")
        return tuple(c for d, c in enumerate(wide) if d not in eqn.params["axes"])

    def _besides(self, fits: Sequence[Fit], numbers: set[int]) -> Var | None:
        """The first of these that is used for something else."""
        for fit in fits:
            users = self.view.users.get(fit.out, ())
            if any(n not in numbers for n in users):
                return fit.out
        return None

    def _used(self, numbers: set[int]) -> bool:
        """Whether something as large as the logits is used besides."""
        wide = self.z.rows * self.z.vocab
        made = [v for n in numbers for v in self.view.eqns[n].outvars if v in self.z.inside]
        large = [v for v in made if math.prod(size(v)) >= wide]
        return any(n not in numbers for v in large for n in self.view.users.get(v, ()))

    def _check(self, out: Fit) -> None:
        """That the loss is not weighted by what logits give, nor a mean over the vocabulary."""
        view, rows = self.view, math.prod(size(out.out))
        after, todo = {out.out}, [out.out]
        while todo:
            v = todo.pop()
            for number in view.users.get(v, ()):
                if number < 0:
                    continue
                eqn = view.eqns[number]
                name = eqn.primitive.name
                if name in ("mul", "div") and self._is_mean(eqn, v, out):
                    raise Other("it is the mean over the vocabulary, not the sum")
                ours = [w for w in read(eqn) if w in self.z.inside]
                by_itself = name in ("mul", "div", "pow", "dot_general") and len(ours) > 1
                if by_itself and rows == self.z.rows and math.prod(size(v)) == rows:
                    raise Other("its losses are weighted by what the logits give, as focal ones are")
                if is_elementwise(eqn) or name in MOVEMENT:
                    new = [w for w in eqn.outvars if w not in after and math.prod(size(w)) == rows]
                    after.update(new)
                    todo += new

    def _is_mean(self, eqn: Any, v: Var, out: Fit) -> bool:
        """Whether it is divided by the size of the vocabulary, or of all logits that it was summed over."""
        n = self.z.vocab * (self.z.rows // max(1, math.prod(size(out.out))) if out.summed else 1)
        if eqn.primitive.name == "div":
            return eqn.invars[0] is v and self._number(eqn.invars[1]) == n
        value = [self._number(w) for w in eqn.invars if w is not v]
        return bool(value) and value[0] is not None and math.isclose(value[0] * n, 1, rel_tol=1e-6)

    def _number(self, atom: Atom) -> float | None:
        """The number that an atom is, if it is just one."""
        try:
            whole = Points(self.view, wide=True).at(atom, [0] * len(size(atom)))
        except Unknown:
            return None
        static_or_literal = isinstance(atom, Literal) or atom in self.known
        return float(whole) if static_or_literal and kind(atom) != "" else None


def _signs(
    view: View, v: Atom, lse: Var, above: set[Var], own: Var, below: set[Var]
) -> tuple[int, int] | None:
    """With which sign a value has each of two in it, 0 where not; None where it has neither."""
    if isinstance(v, Literal) or (v not in above and v not in below):
        return None
    return (_sign(view, v, lse, above) if v in above else 0, _sign(view, v, own, below) if v in below else 0)


def _sign(view: View, v: Var, source: Var, inside: set[Var]) -> int:
    sign = 1
    while v is not source:
        eqn = view.maker(v)
        assert eqn is not None
        k, inner = next((k, w) for k, w in enumerate(eqn.invars) if isinstance(w, Var) and w in inside)
        flips = eqn.primitive.name == "neg" or (eqn.primitive.name == "sub" and k == 1)
        numbers = [
            w.val for w in eqn.invars if isinstance(w, Literal) and eqn.primitive.name in ("mul", "div")
        ]
        sign = -sign if flips != any(np.all(np.asarray(n) < 0) for n in numbers) else sign
        v = inner
    return sign
