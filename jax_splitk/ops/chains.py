"""Evaluates a function's equations so that products which follow each other may be computed as one operation.

Products are put together as long as they take each other's results, and what was there before them: what else depends
on their results is computed after them.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from jax_splitk.ops.call import call_of
from jax_splitk.ops.equations import functions, inner, walk
from jax_splitk.ops.quantized_epilogue import EpilogueCall, quantized_epilogue_p
from jax_splitk.ops.quantized_primitive import quantized_matmul_p
from jax_splitk.runtime.joined_plan import MOST_BUFFERS

PRODUCTS = (quantized_matmul_p, quantized_epilogue_p)
_VIEWS = ("reshape", "squeeze")  # the result's bytes are the operand's
_JITTED = ("jit", "pjit")
_BESIDES = 2  # buffers of a product besides its operands: the result, and the workspace


@dataclasses.dataclass(frozen=True)
class Node:
    """An equation, whose operands and results are numbers of values."""

    eqn: core.JaxprEqn
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def is_product(self) -> bool:
        return self.eqn.primitive in PRODUCTS

    @property
    def is_view(self) -> bool:
        return self.eqn.primitive.name in _VIEWS

    @property
    def residual(self) -> int | None:
        """The place of a product's residual among its operands; None without one."""
        call = call_of(self.eqn)
        has_one = isinstance(call, EpilogueCall) and call.residual
        return len(call.own(self.operands)) + call.bias if has_one else None

    @property
    def awaited(self) -> set[int]:
        """The operands of a product for which its kernel waits: its activations and its residual. It loads the others
        while the kernel before it still runs."""
        places = (0,) if self.residual is None else (0, self.residual)
        return {self.operands[place] for place in places}

    def compute(self, values: dict[int, Any], *, chained: bool = False) -> None:
        """Adds the results to the values.

        Args:
          chained: whether a product is a part of a chain (`Options.chained`).
        """
        eqn, operands = self.eqn, [values[x] for x in self.operands]
        scope = str(eqn.source_info.name_stack)
        with jax.named_scope(scope) if scope else contextlib.nullcontext(), eqn.ctx.manager:
            if self.is_product:
                out = call_of(eqn).in_chain(chained).bind(*operands)
            else:
                out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        values.update(zip(self.results, out if eqn.primitive.multiple_results else [out], strict=True))


class Chain:
    """Products that are not computed yet.

    Attributes:
      nodes: the products, and views of their results.
      results: what these compute.
      later: what else depends on the results.
      later_results: what that computes.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.results: set[int] = set()
        self.later: list[Node] = []
        self.later_results: set[int] = set()

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.results.update(node.results)

    def defer(self, node: Node) -> None:
        self.later.append(node)
        self.later_results.update(node.results)

    @property
    def products(self) -> list[Node]:
        return [node for node in self.nodes if node.is_product]

    @property
    def operands(self) -> list[int]:
        """What the products take besides each other's results, each once."""
        every = dict.fromkeys(x for node in self.nodes for x in node.operands)
        return [x for x in every if x not in self.results]

    def producers(self) -> dict[int, int]:
        """For each result, and each view of one, the number of its product."""
        found: dict[int, int] = {}
        products = itertools.count()
        for node in self.nodes:
            found[node.results[0]] = next(products) if node.is_product else found[node.operands[0]]
        return found

    def replaced(self) -> dict[int, int]:
        """Operands of the chain whose memory a result takes: the place of each among the operands, and the product.

        A residual from outside gives its memory to the last result of its type that is stored when no product reads it
        any more. Where it is the activations of a loop, which the chain replaces, XLA need not copy them.
        """
        products, operands, found = self.products, self.operands, dict[int, int]()
        for node in products:
            if node.residual is None or (residual := node.operands[node.residual]) not in operands:
                continue
            last = max(i for i, each in enumerate(products) if residual in each.operands)
            kind = _type_of(node.eqn.invars[node.residual])
            later = [i for i in range(last + 1, len(products)) if _type_of(products[i].eqn.outvars[0]) == kind]
            if free := [i for i in later if i not in found.values()]:
                found.setdefault(operands.index(residual), free[-1])
        return found

    def computed(self, operands: Sequence[Any], *, chained: bool = False) -> list[jax.Array]:
        """The products' results, by an equation each."""
        values = dict(zip(self.operands, operands, strict=True))
        for node in self.nodes:
            node.compute(values, chained=chained)
        return [values[node.results[0]] for node in self.products]

    def takes(self, product: Node) -> bool:
        """Whether the product may be the next one."""
        awaited = product.awaited
        if any(x in self.later_results or (x in self.results and x not in awaited) for x in product.operands):
            return False
        return sum(len(node.operands) + _BESIDES for node in (*self.products, product)) <= MOST_BUFFERS


def _type_of(x: Any) -> tuple[Any, Any]:
    return x.aval.shape, x.aval.dtype


def evaluated(
    closed: core.ClosedJaxpr,
    operands: Sequence[Any],
    joins: Callable[[core.JaxprEqn], bool],
    joined: Callable[[Chain, Sequence[Any]], Sequence[jax.Array]],
) -> list[Any]:
    """The results of a function.

    Args:
      joins: whether a product may be a part of a chain.
      joined: computes the products of a chain of at least two, from the values of its operands.
    """
    values: dict[int, Any] = {}
    nodes, results = _flattened(closed, operands, values)
    chain = Chain()

    def end() -> None:
        nonlocal chain
        ended, chain = chain, Chain()
        products = ended.products
        if len(products) > 1:
            found = joined(ended, [values[x] for x in ended.operands])
            values.update({node.results[0]: x for node, x in zip(products, found, strict=True)})
        for node in (*ended.nodes, *ended.later):
            if node.results and node.results[0] in values:
                continue
            node.compute(values)

    for node in nodes:
        if node.is_product and joins(node.eqn):
            if not chain.takes(node):
                end()
            chain.add(node)
        elif node.eqn.effects:
            end()
            node.compute(values)
        elif any(x in chain.later_results for x in node.operands):
            chain.defer(node)
        elif any(x in chain.results for x in node.operands):
            (chain.add if node.is_view else chain.defer)(node)
        else:
            node.compute(values)
    end()
    return [values[x] for x in results]


def _flattened(
    closed: core.ClosedJaxpr, operands: Sequence[Any], values: dict[int, Any]
) -> tuple[list[Node], list[int]]:
    """The equations, with those of jitted functions that have products in their places, and the numbers of the results.
    Adds operands and constants to the values."""
    nodes: list[Node] = []

    def number(value: Any) -> int:
        values[given := next(counter)] = value
        return given

    def visit(jaxpr: core.Jaxpr, numbers: dict[core.Var, int]) -> list[int]:
        def read(x: Any) -> int:
            return numbers[x] if isinstance(x, core.Var) else number(x.val)

        for eqn in jaxpr.eqns:
            given = tuple(map(read, eqn.invars))
            if eqn.primitive.name in _JITTED and any(each.primitive in PRODUCTS for each in _walked(eqn)):
                (function,) = functions(eqn)
                bound = dict(zip(function.jaxpr.constvars, map(number, function.consts), strict=True))
                found = visit(function.jaxpr, bound | dict(zip(function.jaxpr.invars, given, strict=True)))
            else:
                found = [next(counter) for _ in eqn.outvars]
                nodes.append(Node(eqn, given, tuple(found)))
            numbers.update(zip(eqn.outvars, found, strict=True))
        return [read(x) for x in jaxpr.outvars]

    counter = itertools.count()
    numbers = dict(zip(closed.jaxpr.constvars, map(number, closed.consts), strict=True))
    results = visit(closed.jaxpr, numbers | dict(zip(closed.jaxpr.invars, map(number, operands), strict=True)))
    return nodes, results


def _walked(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    return (each for jaxpr in inner(eqn) for each in walk(jaxpr))
