"""Joader's coupling on plain sets, as the paper states it: the oracle of `headway.data.orders.random_orders`."""


def chain(sets, uniform, pick):
    """One step of the chain, on plain sets: the law of the paper word by word. Returns [(item, jobs)]."""
    order = sorted(sets, key=lambda job: len(sets[job]))
    removed, given, k = set(), [], 0
    while k < len(order):
        common = set.intersection(*(sets[job] for job in order[k:])) - removed
        previous, m = len(common), 0
        while m < len(order) - k and uniform(previous, len(sets[order[k + m]] - removed)):
            previous = len(sets[order[k + m]] - removed)
            m += 1
        if m == 0:
            given.append((pick(sets[order[k]] - removed - common), {order[k]}))
            k += 1
        else:
            given.append((pick(common), set(order[k : k + m])))
            k += m
        removed |= common
    return given
