"""The algebra under axis discovery: every dimension is a product of factors, and factors are tied, split and
cut.

A factor is a node of a union-find structure. Tying two makes them one class. A reshape splits a factor into a
product, major to minor, and the split then holds wherever the class occurs. A slice, a concatenation or a pad
relates a factor to its parts: a part is a factor of its own, and asking twice for the same part gives the
same one. Nodes are plain numbers, so that the analysis costs little; the class of the lowest number
represents the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

Raw = tuple[int, ...]
"""One dimension as nodes, major to minor; () for size 1."""
Shape = tuple[Raw, ...]
"""One array as its dimensions."""
Cut = tuple[int, int, int]
"""A part of a factor: first index, size, stride."""

_FEW = 16  # parts of one factor, up to which a new one is looked for inside the others


class Factors:
    """The union-find structure. `split[x]` are the factors of a class that is a product, `parts[x]` its known
    parts.
    """

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.split: dict[int, Raw] = {}
        self.parts: dict[int, dict[Cut, Raw]] = {}
        self.loose: dict[int, int] = {}  # a part of unknown place -> the whole

    def fresh(self, sizes: Sequence[int]) -> Shape:
        """The dimensions of an array that nothing is known of."""
        parent, shape = self.parent, list[Raw]()
        for n in sizes:
            if n == 1:
                shape.append(())
            else:
                shape.append((len(parent),))
                parent.append(len(parent))
                self.size.append(n)
        return tuple(shape)

    def find(self, node: int) -> int:
        parent = self.parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def leaves(self, dim: Raw) -> Raw:
        """A dimension as representatives of classes that are no products."""
        if len(dim) == 1:
            root = self.find(dim[0])
            children = self.split.get(root)
            return (root,) if children is None else self.leaves(children)
        return tuple(leaf for node in dim for leaf in self.leaves((node,)))

    def length(self, dim: Raw) -> int:
        return prod(self.size[node] for node in dim)

    # Tying

    def tie(self, a: Shape, b: Shape) -> None:
        """Two arrays of one shape, dimension by dimension."""
        if a is not b:
            for x, y in zip(a, b, strict=True):
                if x != y:
                    self.tie_dim(x, y)

    def meet(self, a: Shape, b: Shape) -> Shape:
        """Two arrays in one elementwise operation, where a dimension of size 1 is broadcast; the result's
        dimensions.
        """
        if a == b:
            return a
        shape = []
        for x, y in zip(a, b, strict=True):
            if x and y and x != y:
                self.tie_dim(x, y)
            shape.append(x or y)
        return tuple(shape)

    def tie_dim(self, a: Raw, b: Raw) -> None:
        """Two dimensions of one size. Products are refined against each other as far as their boundaries
        agree.
        """
        if len(a) == 1 and len(b) == 1:
            x, y = self.find(a[0]), self.find(b[0])
            if x == y:
                return
            if x not in self.split and y not in self.split:
                if self.size[x] == self.size[y]:
                    self._merge(x, y)
                return
        left, right = list(reversed(self.leaves(a))), list(reversed(self.leaves(b)))
        while left and right:
            x, y = self._top(left), self._top(right)
            m, n = self.size[x], self.size[y]
            if x == y or m == n:
                left.pop(), right.pop()
                if x != y:
                    self._merge(x, y)
            elif n and m > n and m % n == 0:
                self.divide(x, (n, m // n))
            elif m and n > m and n % m == 0:
                self.divide(y, (m, n // m))
            else:
                return

    def _top(self, stack: list[int]) -> int:
        """The last entry of a stack of nodes as a class that is no product, refined in place."""
        while True:
            root = self.find(stack[-1])
            children = self.split.get(root)
            if children is None:
                stack[-1] = root
                return root
            stack[-1:] = reversed(children)

    def _merge(self, x: int, y: int) -> None:
        keep, gone = (x, y) if x < y else (y, x)
        self.parent[gone] = keep
        if gone in self.loose:
            self.loose.setdefault(keep, self.loose.pop(gone))
        theirs = self.parts.pop(gone, None)
        if theirs:
            ours = self.parts.setdefault(keep, {})
            both = [(ours[cut], dim) for cut, dim in theirs.items() if cut in ours]
            for cut, dim in theirs.items():
                ours.setdefault(cut, dim)
            for a, b in both:
                self.tie_dim(a, b)

    def divide(self, x: int, sizes: Sequence[int]) -> None:
        """The class of x becomes a product, and its parts are related to the new factors."""
        x = self.find(x)
        self.split[x] = children = tuple(dim[0] for dim in self.fresh(sizes))
        for (start, size, stride), dim in self.parts.pop(x, {}).items():
            self.tie_dim(dim, self.part(children, start, size, stride))

    def reshape(self, dims: Iterable[Raw], sizes: Sequence[int]) -> Shape:
        """The same elements in other dimensions: both sides are refined to common factors, where there are
        any.
        """
        if 0 in sizes:
            return self.fresh(sizes)
        stack = [leaf for dim in dims for leaf in self.leaves(dim)][::-1]
        shape: list[Raw] = []
        todo = list(reversed(sizes))
        while todo:
            need = todo.pop()
            got: list[int] = []
            while need > 1:
                x = self._top(stack)
                m = self.size[x]
                if need % m == 0:
                    got.append(stack.pop())
                    need //= m
                elif m % need == 0:
                    self.divide(x, (need, m // need))
                else:
                    break
            if need == 1:
                shape.append(tuple(got))
                continue
            shape += self._misfit(stack, todo, prod(self.size[x] for x in got), need)
        return tuple(shape)

    def _misfit(self, stack: list[int], todo: list[int], done: int, need: int) -> Shape:
        """Unrelated dimensions for a stretch of a reshape without common factors, up to where both sides meet
        again.
        """
        ours, theirs = done, done * need
        sizes = [theirs]
        while ours != theirs:
            if ours < theirs:
                ours *= self.size[self._top(stack)]
                stack.pop()
            else:
                sizes.append(todo.pop())
                theirs *= sizes[-1]
        return self.fresh(sizes)

    # Parts

    def part(self, dim: Raw, start: int, size: int, stride: int = 1) -> Raw:
        """The dimension of a slice. Whole factors stay; a stretch of one is its part, the same each time."""
        if size == 1:
            return ()
        leaves = self.leaves(dim)
        total = self.length(leaves)
        if size == total or not leaves:
            return dim
        if size == 0:
            return self.fresh((0,))[0]
        if len(leaves) == 1:
            return self._cut(leaves[0], start, size, stride)
        inner = total // self.size[leaves[0]]
        if stride == 1 and start // inner == (start + size - 1) // inner:
            return self.part(leaves[1:], start % inner, size)
        if stride == 1 and start % inner == 0 and size % inner == 0:
            return self.part(leaves[:1], start // inner, size // inner) + leaves[1:]
        if stride > 1 and stride % inner == 0:
            return self.part(leaves[:1], start // inner, size, stride // inner)
        return self.some_part(leaves, size)

    def _cut(self, x: int, start: int, size: int, stride: int) -> Raw:
        known = self.parts.setdefault(x, {})
        found = known.get((start, size, stride))
        if found is not None:
            return found
        if stride == 1 and len(known) <= _FEW:
            for (at, n, step), dim in known.items():
                if step == 1 and at <= start and start + size <= at + n:
                    return self.part(dim, start - at, size)
        known[start, size, stride] = dim = self.fresh((size,))[0]
        return dim

    def some_part(self, dim: Raw, size: int) -> Raw:
        """A stretch of a dimension at an unknown place: a factor of its own, which remembers where it came
        from.
        """
        if size == 1:
            return ()
        new = self.fresh((size,))[0]
        leaves = self.leaves(dim)
        if leaves:
            self.loose[new[0]] = leaves[0]
        return new

    def whole(self, total: int, parts: Mapping[Cut, Raw]) -> Raw:
        """The dimension of which these are parts."""
        for (_, size, _), dim in parts.items():
            if size == total:
                return dim
        new = self.fresh((total,))[0]
        if new:
            self.parts[new[0]] = dict(parts)
        return new

    # Sums

    def sum(self, x: int) -> tuple[Raw, ...]:
        """The fewest parts of a class that lie one after the other and make up the whole; () if none do."""
        best: dict[int, tuple[Raw, ...]] = {0: ()}
        for (start, size, stride), dim in sorted(self.parts.get(x, {}).items()):
            if stride == 1 and start in best and 0 < size < self.size[x]:
                chain = (*best[start], dim)
                if start + size not in best or len(chain) < len(best[start + size]):
                    best[start + size] = chain
        return best.get(self.size[x], ())

    def tie_equal_sums(self) -> None:
        """A join of the same parts in the same order is the same axis: [f(x[:h]), g(x[h:])] has the axis of
        x.

        A part of size 1 is no evidence of anything, so sums with one are left.
        """
        changed = True
        while changed:
            changed = False
            seen: dict[tuple[Raw, ...], int] = {}
            for x in sorted(self.parts):
                dims = tuple(map(self.leaves, self.sum(x))) if x in self.parts else ()
                if dims and all(dims):
                    other = seen.setdefault(dims, x)
                    if self.find(other) != self.find(x):
                        self.tie_dim((other,), (x,))
                        changed = True
