"""The Feistel network of `jaxattr.ops.permutation` with Python integers, and the orders that follow from it."""

ROUNDS = 6
WORD = 2**32


def mix(x, key):
    x ^= key
    x = (x ^ (x >> 16)) * 0x85EBCA6B % WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % WORD
    return x ^ (x >> 16)


def bijection(index, round_keys, bits):
    low_bits = bits // 2
    high_bits = bits - low_bits
    low, high = index % 2**low_bits, index // 2**low_bits
    for r in range(ROUNDS):
        if r % 2 == 0:
            high ^= mix(low, round_keys[r]) % 2**high_bits
        else:
            low ^= mix(high, round_keys[r]) % 2**low_bits
    return high * 2**low_bits + low


def order(round_keys, n, keep=None):
    """The kept indices in the order in which the network visits them."""
    bits = max(2, (n - 1).bit_length())
    visited = [bijection(i, round_keys, bits) for i in range(2**bits)]
    return [i for i in visited if i < n and (keep is None or keep[i])]
