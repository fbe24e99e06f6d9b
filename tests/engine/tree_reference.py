"""DDTree in plain Python: the heap, all trees of a size, their order, ancestors, and the walk down a tree."""

from __future__ import annotations

import heapq
import math
import struct
from dataclasses import dataclass


def fp32(value: float) -> float:
    """`value` rounded to single precision; of two such numbers' sum, what single precision adds."""
    return struct.unpack("f", struct.pack("f", value))[0]


@dataclass
class Tree:
    """Per node, the root first: parent, depth, rank among its position's candidates, and score."""

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    scores: list[float]

    @classmethod
    def root(cls) -> Tree:
        return cls([-1], [0], [-1], [0.0])

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parent: int, rank: int, score: float) -> int:
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ranks.append(rank)
        self.scores.append(score)
        return len(self) - 1

    def path(self, node: int) -> list[int]:
        """From the root to the node."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def ranks_to(self, node: int) -> tuple[int, ...]:
        return tuple(self.ranks[at] for at in self.path(node)[1:])

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, len(self)) if self.parents[child] == node]


def heap_tree(logp: list[list[float]], window: int, spine: bool) -> Tree:
    """Best first with a heap. Slot 2i is made for node i's next sibling, slot 2i + 1 for its first child."""
    depth, k = len(logp), len(logp[0])
    tree = Tree.root()
    heap: list[tuple[float, int, int, int]] = []

    def offer(parent: int, rank: int, slot: int) -> None:
        level = tree.depths[parent]
        if level < depth and rank < k:
            score = fp32(tree.scores[parent] + logp[level][rank])
            heapq.heappush(heap, (-score, slot, parent, rank))

    if spine:
        for level in range(min(depth, window - 1)):
            node = tree.add(level, 0, fp32(tree.scores[level] + logp[level][0]))
            offer(level, 1, 2 * node)
    else:
        offer(0, 0, 1)
    while heap and len(tree) < window:
        negative, _, parent, rank = heapq.heappop(heap)
        if not negative < math.inf:  # nor where it is not a number
            break
        node = tree.add(parent, rank, -negative)
        offer(parent, rank + 1, 2 * node)
        offer(node, 0, 2 * node + 1)
    return tree


def grown(logp: list[list[float]], window: int, spine: bool) -> Tree:
    """The heap's tree in the order of the window."""
    return ordered(heap_tree(logp, window, spine))


def ordered(tree: Tree) -> Tree:
    """The same tree depth first, the children of a node from the smallest to the largest, elders first."""
    sizes = [sum(node in tree.path(at) for at in range(len(tree))) for node in range(len(tree))]
    sorted_tree = Tree.root()

    def visit(node: int, place: int) -> None:
        for child in sorted(tree.children(node), key=lambda child: (sizes[child], child)):
            visit(child, sorted_tree.add(place, tree.ranks[child], tree.scores[child]))

    visit(0, 0)
    return sorted_tree


def moves(tree: Tree, window: int) -> list[int]:
    """Per node where its parent's state comes from and its own goes to, as `DraftTree` says.

    By a stack of the nodes whose later children are to come: a node's slot is its place in the stack. Leaves leave
    the state of their parent in hand.
    """

    def inner(nodes: list[int]) -> list[int]:
        return [node for node in nodes if tree.children(node)]

    waiting: list[int] = []
    table = []
    for node in range(len(tree)):
        siblings = inner(tree.children(tree.parents[node])) if node else []
        take = keep = 0
        if node in siblings[1:]:
            assert waiting[-1] == tree.parents[node]
            take = len(waiting)
            if node == siblings[-1]:
                waiting.pop()
        if len(inner(tree.children(node))) > 1:
            waiting.append(node)
            keep = len(waiting)
        table.append(take | keep << 8 | (not tree.children(node)) << 16)
    assert waiting == []
    return table + [1 << 16] * (window - len(tree))


def best_weight(logp: list[list[float]], nodes: int, spine: bool) -> float:
    """The most that any tree of `nodes` drafted tokens can weigh: the sum of its nodes' probabilities.

    Every set of rank paths that holds each path's prefixes is tried; siblings need not be of adjacent ranks.
    """
    depth, k = len(logp), len(logp[0])

    def weight(path: tuple[int, ...]) -> float:
        return math.exp(sum(logp[level][rank] for level, rank in enumerate(path)))

    def below(path: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(*path, rank) for rank in range(k)] if len(path) < depth else []

    def extend(frontier: list[tuple[int, ...]], left: int, total: float) -> float:
        """Take or leave the frontier's paths one by one, so that each set is met once."""
        best = total
        for index, path in enumerate(frontier):
            if left:
                rest = frontier[index + 1 :] + below(path)
                best = max(best, extend(rest, left - 1, total + weight(path)))
        return best

    if not spine:
        return extend(below(()), nodes, 0.0)
    chain = [(0,) * length for length in range(1, min(depth, nodes) + 1)]
    frontier = [path for start in ((), *chain) for path in below(start) if path not in chain]
    return extend(frontier, nodes - len(chain), sum(map(weight, chain)))


def tables(tree: Tree, ids: list[list[int]], root: int, seq_len: int, window: int) -> dict[str, list]:
    """What `build_tree` is to give for the tree, pads after its last node."""
    pads = window - len(tree)
    depths = tree.depths + [1] * pads
    seen = [tree.path(node) if node < len(tree) else [0, node] for node in range(window)]
    return {
        "tokens": [root]
        + [ids[tree.depths[node] - 1][tree.ranks[node]] for node in range(1, len(tree))]
        + [root] * pads,
        "positions": [seq_len + depth for depth in depths],
        "parents": tree.parents + [-1] * pads,
        "depths": depths,
        "ancestors": [signed(sum(1 << at for at in nodes)) for nodes in seen],
        "on_spine": [node < len(tree) and not any(tree.ranks_to(node)) for node in range(window)],
        "moves": moves(tree, window),
    }


def signed(bits: int) -> int:
    """64 bits as the int64 that has them."""
    return bits - (1 << 64) if bits >> 63 else bits


def dense_mask(tree: Tree, seq_len: int, window: int) -> list[list[int]]:
    """Row by row, whether a node sees each token of the prefix and each node."""
    rows = []
    for node in range(window):
        seen = tree.path(node) if node < len(tree) else [0, node]
        rows.append([1] * seq_len + [int(at in seen) for at in range(window)])
    return rows


def walk(answer: dict[str, list], targets: list[int], max_depth: int) -> list[int]:
    """The walk to the children that have the target's tokens, packed as `walk_tree` packs it."""
    path, emitted = [0], []
    while True:
        wanted = targets[path[-1]]
        emitted.append(wanted)
        children = [node for node, parent in enumerate(answer["parents"]) if parent == path[-1]]
        fitting = [node for node in children if answer["tokens"][node] == wanted]
        if not fitting or len(path) > max_depth:
            break
        path.append(fitting[0])
    pad = [-1] * (max_depth + 1 - len(path))
    return [*path, *pad, *emitted, *pad, len(emitted)]
