"""The worker's end of a channel: frames of any size arrive whole, in order, to the end."""

from __future__ import annotations

import socket
import threading
from itertools import accumulate

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


@given(st.lists(st.binary(max_size=9)), st.lists(st.integers(1, 12), min_size=1))
def test_a_frame_is_taken_when_its_last_byte_is_there(frames: list[bytes], sizes: list[int]) -> None:
    buffer, packed, taken, at = FrameBuffer(), [*map(pack_frame, frames)], list[bytes](), 0
    ends, data = [*accumulate(map(len, packed))], b"".join(packed)
    while at < len(data):
        size = sizes[at % len(sizes)]
        buffer += data[at : at + size]
        at += size
        while (frame := buffer.take()) is not None:
            taken.append(frame)
        assert len(taken) == sum(end <= at for end in ends)
    assert taken == frames and not len(buffer)
