"""Dialog: a chat on the screen, from the question to the answer and its figures."""

from __future__ import annotations

from contextlib import closing

from cllm.cli.answers import AnswerEnd, AnswerSource, AnswerStats
from cllm.cli.terminal import Screen
from cllm.cli.transcript import Transcript


class Chat:
    """A conversation and where its answers come from."""

    def __init__(self, source: AnswerSource, transcript: Transcript, screen: Screen) -> None:
        self.source, self.transcript, self.screen = source, transcript, screen
        self.stats: list[AnswerStats] = []  # of all answers

    def answer(self) -> bool:
        """Answer the last question; False where that fails or is stopped. What came before stays.

        Raises CllmError; the question then stays, without an answer. Ctrl-C stops the answer: what there is
        of it counts.
        """
        stats, text, reasoning = AnswerStats(), list[str](), list[str]()
        try:
            self._read(stats, text, reasoning)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
        finally:
            self.screen.end()
        self.stats.append(stats)
        if text or not stopped:
            self.transcript.answer("".join(text), "".join(reasoning))
        return not stopped

    def _read(self, stats: AnswerStats, text: list[str], reasoning: list[str]) -> None:
        hidden = self.transcript.think == "hide"
        thinking = False
        with closing(self.source.answer(self.transcript.rendered(), self.transcript.options())) as answer:
            for piece in answer:
                if isinstance(piece, AnswerEnd):
                    stats.end = piece
                    continue
                stats.see_piece()
                (reasoning if piece.reasoning else text).append(piece.text)
                if piece.reasoning and hidden:
                    self.screen.write("" if thinking else "thinking …", dim=True)
                else:
                    if thinking and not piece.reasoning:
                        self.screen.end()
                    self.screen.write(piece.text, dim=piece.reasoning)
                thinking = piece.reasoning

    def describe_last(self) -> str:
        return self.stats[-1].describe(self.source.context)
