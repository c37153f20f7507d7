"""A tokenizer worker that crashes on request: `python -m tests.unit.workers.crashing_worker FD …`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import msgspec

from cllm.messages import (
    Died,
    Heartbeat,
    Prepare,
    RenderChat,
    Text,
    TokenizerCall,
    TokenizerReady,
    TokenizerReply,
    TokenizeTexts,
)
from cllm.text.prompt import Chat
from cllm.types import ConstraintSpec
from cllm.workers.channel import Channel


def beat(channel: Channel) -> None:
    while True:
        try:
            channel.send(msgspec.msgpack.encode(Heartbeat(0.0)))
        except OSError:
            os._exit(0)  # the parent is gone
        time.sleep(0.1)


def main(first: TokenizerReady | None = None) -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    channel.receive()  # the configuration
    threading.Thread(target=beat, args=(channel,), daemon=True).start()
    if first is not None:
        channel.send(msgspec.msgpack.encode(first))
    while (frame := channel.receive()) is not None:
        call = msgspec.msgpack.decode(frame, type=TokenizerCall)
        time.sleep(0.02)  # so that the others are here too when it dies
        match call.task:
            case TokenizeTexts(("die",)) | Prepare(constraint=ConstraintSpec()):
                os.kill(os.getpid(), signal.SIGKILL)
            case TokenizeTexts(("give up",)):
                channel.send(msgspec.msgpack.encode(Died("model_file_error", "no such file")))
                sys.exit(1)
            case TokenizeTexts(("hang",)):
                time.sleep(600)
            case TokenizeTexts(("stop",)):
                os.kill(os.getpid(), signal.SIGSTOP)
            case TokenizeTexts(("mumble",)):
                channel.send(b"\xc1 is no MessagePack")
            case TokenizeTexts(("who",)):
                channel.send(msgspec.msgpack.encode(TokenizerReply(call.call_id, Text(str(os.getpid())))))
            case RenderChat(Chat(({"content": "endless"},))):
                os.kill(os.getpid(), signal.SIGPROF)
            case RenderChat():
                channel.send(msgspec.msgpack.encode(TokenizerReply(call.call_id, Text("rendered"))))
            case TokenizeTexts((text,)):
                time.sleep(0.3 if text == "slow" else 0)
                channel.send(msgspec.msgpack.encode(TokenizerReply(call.call_id, Text(text))))


if __name__ == "__main__":
    main()
