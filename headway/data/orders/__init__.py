"""Who reads which item when: seeded permutations, and the orders that several jobs share."""
