"""Lossless patches from one set of weights to the next, for a trainer to send to receivers that hold a copy.

With a small learning rate, few weights change per step in the type that inference reads. A patch has the positions of
these weights, by the codecs of `jaxcomm.codecs`, and the change of each weight's bit pattern, read as an integer. Most
change by one, so that they are deflated to a bit or two each. Packing and applying run on the host, without a mesh.

Source: "PULSE", 2026, https://arxiv.org/abs/2602.03839, after its abstract alone: the weights whose bfloat16 has
changed, without loss. The coding of positions and values is this library's own.
"""

import hashlib
import struct
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.checks import check_range
from jaxcomm.codecs.indices import INDEX_CODECS, choose_index_codec
from jaxcomm.collectives.messages import fuse, split_words
from jaxcomm.layout import Layout
from jaxcomm.selectors.selection import compact
from jaxcomm.types import PyTree

_MAGIC = b"jcp2"  # the last character is the version
_HEADER = struct.Struct("<4sI12s8s8s8s")  # magic, CRC of what follows, dtype, tree, digests of old and new
_PART = struct.Struct("<BII")  # number of the codec, changes, bytes of the deflated differences
_CODECS = tuple(INDEX_CODECS.values())
_LENGTH = 1 << 30  # elements of a part of the weights: positions are below 2^31


def pack_patch(old: PyTree, new: PyTree, dtype: Any = jnp.bfloat16) -> bytes:
    """Packs the difference between old and new weights: exactly those whose bits differ in a type.

    `apply_patch(old, pack_patch(old, new))` has the bits of `new`, cast to the type, including negative zeros and NaNs.

    Args:
      old: a pytree of arrays of real floating types, which the receiver holds.
      new: a pytree of the same structure and shapes.
      dtype: the type to compare in and to patch, a floating type of 16 or 32 bits.

    Returns:
      The patch. If a fraction p of the weights has changed, evenly spread, a change takes about 2 + log2(1/p) bits for
      its position and 1 to 2 for its value. In addition, a patch takes 53 bytes.

    Raises:
      ValueError: for other types, an empty tree, or other shapes.
    """
    dtype = jnp.dtype(dtype)
    holds = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in (2, 4)
    check_range("dtype", dtype.name, "a floating type of 16 or 32 bits", holds, "Pass jnp.bfloat16")
    before, after = _bits(old, dtype), _bits(new, dtype)
    shapes = _fingerprint(old), _fingerprint(new)
    if shapes[0] != shapes[1]:
        raise ValueError(
            "old and new must have the same tree and shapes; got different ones. Pass weights of one model."
        )
    body = b""
    for start in range(0, before.size, _LENGTH):
        part = slice(start, start + _LENGTH)
        body += _pack_part(before[part], after[part])
    content = _HEADER.pack(_MAGIC, 0, dtype.name.encode(), shapes[0], _digest(before), _digest(after))[8:] + body
    return _MAGIC + struct.pack("<I", zlib.crc32(content)) + content


def apply_patch(old: PyTree, patch: bytes) -> Any:
    """Returns the new weights, from the old ones and a patch.

    Args:
      old: the weights that the patch was packed against, in any type that casts to the same bits.
      patch: from `pack_patch`.

    Returns:
      A tree like `old` of NumPy arrays in the patch's type, with exactly the bits of the new weights.

    Raises:
      ValueError: if the patch is damaged or cut short, or is for other shapes or weights.
    """
    if patch[:4] != _MAGIC or len(patch) < _HEADER.size or zlib.crc32(patch[8:]) != _HEADER.unpack_from(patch)[1]:
        raise ValueError(
            f"patch must be the whole output of pack_patch, of version {_MAGIC.decode()}; got {len(patch)} bytes that "
            "are not. Fetch it again, with the same version of jaxcomm on both sides."
        )
    _, _, name, fingerprint, digest, new_digest = _HEADER.unpack_from(patch)
    if _fingerprint(old) != fingerprint:
        raise ValueError("old must have the tree and the shapes of the patch; got others. Pass weights of its model.")
    dtype = jnp.dtype(name.rstrip(b"\0").decode())
    words = _bits(old, dtype)
    if _digest(words) != digest:
        raise ValueError(
            "old must be the weights that the patch was packed against; got others. Apply patches in their order, none "
            "twice, or fetch whole weights."
        )
    at = _HEADER.size
    for start in range(0, words.size, _LENGTH):
        at = _apply_part(words[start : start + _LENGTH], patch, at)
    if _digest(words) != new_digest:
        raise ValueError("The patched weights must be the new ones; got others. Fetch whole weights.")
    leaves, tree = jax.tree.flatten(old)
    ends = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    return tree.unflatten(
        [part.view(dtype).reshape(np.shape(leaf)) for part, leaf in zip(np.split(words, ends), leaves, strict=True)]
    )


def _bits(tree: PyTree, dtype: Any) -> np.ndarray:
    """Returns a new array of the bits of all weights, cast: (n,) uint16 or uint32."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    kinds = {leaf.dtype.name for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.floating)}
    check_range("The weights", sorted(kinds), "of real floating types", not kinds, "Leave the others out")
    check_range("The weights", tree, "at least one array", bool(leaves), "Pass the parameters of a model")
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.concatenate([leaf.astype(dtype, copy=False).reshape(-1).view(unsigned) for leaf in leaves])


def _fingerprint(tree: PyTree) -> bytes:
    """Returns 8 bytes of the tree and the shapes."""
    shapes = [(jax.tree_util.keystr(path), np.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).digest()


def _digest(words: np.ndarray) -> bytes:
    return hashlib.blake2b(words.view(np.uint8).data, digest_size=8).digest()


def _layout(n: int, count: int) -> Layout:
    return Layout(((n,),), (jnp.dtype(jnp.float32),), (True,), (count,))


def _pack_part(old: np.ndarray, new: np.ndarray) -> bytes:
    """Packs the changes of a part of the weights."""
    position = np.flatnonzero(old != new)  # (count,)
    if not position.size:
        return _PART.pack(0, 0, 0)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        layout = _layout(old.size, position.size)
        mask = np.zeros(layout.n, bool)
        mask[position] = True
        selection = compact(jnp.asarray(np.packbits(mask, bitorder="little").view(np.uint32)), layout)
        codec = choose_index_codec(layout)
        indices = np.asarray(fuse(codec.encode(selection))).tobytes()
    signed = np.dtype(f"i{old.itemsize}")
    change = (new[position] - old[position]).view(signed)
    zigzag = (change << 1) ^ (change >> (8 * old.itemsize - 1))  # 0, -1, 1, -2, ... as 0, 1, 2, 3, ...
    octets = np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, old.itemsize).T)
    deflate = zlib.compressobj(9, strategy=zlib.Z_RLE)  # nearly all high bytes are 0
    values = deflate.compress(octets.tobytes()) + deflate.flush()
    return _PART.pack(_CODECS.index(type(codec)), position.size, len(values)) + indices + values


def _apply_part(words: np.ndarray, patch: bytes, at: int) -> int:
    """Changes a part of the weights in place; returns where in the patch the next part starts."""
    number, count, length = _PART.unpack_from(patch, at)
    at += _PART.size
    if not count:
        return at
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        layout = _layout(words.size, count)
        codec = _CODECS[number](layout)
        mask = jax.ShapeDtypeStruct((layout.n_words,), jnp.uint32)
        like = jax.eval_shape(lambda mask: codec.encode(compact(mask, layout)), mask)
        indices = np.frombuffer(patch, np.uint32, codec.n_words, at)
        position = np.asarray(codec.decode(split_words(jnp.asarray(indices), like)))
    at += 4 * codec.n_words
    octets = np.frombuffer(zlib.decompress(patch[at : at + length]), np.uint8).reshape(words.itemsize, count)
    zigzag = np.ascontiguousarray(octets.T).view(words.dtype)[:, 0]
    words[position] += (zigzag >> 1) ^ -(zigzag & 1)
    return at + length
