"""The worker's end of a channel: frames of any size arrive whole, in order, to the end."""

from __future__ import annotations

import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from cllm.workers.channel import Channel, FrameBuffer, pack_frame

PATIENCE_S = 60


def test_frames_of_any_size_arrive_whole_and_the_end_is_none() -> None:
    pair = socket.socketpair()
    for each in pair:
        each.settimeout(PATIENCE_S)
    ours, theirs = map(Channel, pair)
    frames = [b"", b"x", b"y" * (1 << 20), b"z"]
    sender = threading.Thread(target=lambda: [*map(ours.send, frames)])
    sender.start()
    assert [theirs.receive() for _ in frames] == frames
    sender.join(PATIENCE_S)
    ours.close()
    assert theirs.receive() is None
    theirs.close()


def test_a_frame_is_taken_when_its_last_byte_is_there() -> None:
    buffer = FrameBuffer()
    data = b"\x03\0\0\0abc" + b"\0\0\0\0" + b"\x01\0\0\0d"
    taken = []
    for index in range(len(data)):
        buffer += data[index : index + 1]
        while (frame := buffer.take()) is not None:
            taken.append((index, frame))
    assert taken == [(6, b"abc"), (10, b""), (15, b"d")]


@given(st.lists(st.binary(max_size=9)), st.lists(st.integers(1, 12), min_size=1))
def test_frames_come_whole_however_they_are_cut(frames: list[bytes], sizes: list[int]) -> None:
    buffer, data, taken, at = FrameBuffer(), b"".join(map(pack_frame, frames)), list[bytes](), 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        buffer += data[at : at + size]
        at += size
        while (frame := buffer.take()) is not None:
            taken.append(frame)
    assert taken == frames and not len(buffer)
