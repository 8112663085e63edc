"""Replays like eager: a callable is captured once, replayed over inputs that change, and compared with itself.

A round draws inputs and a live batch, writes them into the static inputs, poisons what is to be written, hands out and
overwrites freed memory, replays, and then runs the callable eagerly on copies of the same inputs, cut to the live
batch. Outputs must be equal bit by bit, inputs and the memory beside them unwritten, and everything where it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from dsa_verify.base.errors import CaptureError, DeviceLost, NothingVerified, ReplayError, UsageError
from dsa_verify.changed_inputs.arguments import Call, Declared, tensors_by_path
from dsa_verify.changed_inputs.compare import History, Observation, elements_of, first_difference, narrow_like
from dsa_verify.changed_inputs.drawing import Rules
from dsa_verify.changed_inputs.poisoned import PoisonedAllocations, churned, fill
from dsa_verify.changed_inputs.result import EQUAL, LikeEager, NotLikeEager
from dsa_verify.graphs import Backend, Graph, open_backend
from dsa_verify.metadata_guard.place import Place
from dsa_verify.nested.bits import Differing, checksum, differing, shown, unravel
from dsa_verify.nested.copies import GUARD_BYTE, Copies
from dsa_verify.nested.parts import PLAIN, map_tensors, tensors_in

ROUNDS: Final = 24
FEWEST_ROUNDS: Final = 3  # the first two change nothing, which an accumulation does not survive
TWICE_EVERY: Final = 4  # a round in which eager work runs under both poisons
GIVEN: Final = "on the inputs as given"
Outputs = dict[str, torch.Tensor]


def replays_like_eager(
    fn: Callable[..., Any],
    inputs: Any,
    *,
    change: object = None,
    batch: Mapping[str, int] | Iterable[str] | None = None,
    pads: Mapping[str, int | float | str] | None = None,
    writes: Iterable[str] = (),
    updates: Iterable[str] = (),
    scratch: Iterable[str] = (),
    rounds: int = ROUNDS,
    seed: int = 0,
    backend: Backend | None = None,
    raises: bool = True,
) -> LikeEager:
    """Capture `fn(*inputs)` once and compare its replays over changed inputs with `fn` run eagerly on copies of them.

    `fn` is any callable over tensors; it is not changed, and `inputs` are not written. `inputs`: a tuple of positional
    arguments, a mapping of keyword arguments or a single tensor; arguments may be nested objects of tensors. Paths name
    them by parameter: `x`, `tables[2].lens`. Results are the tensors that `fn` returns and the inputs that it writes.

    `change`: how inputs change, by path: (low, high), both included; "permute"; "keep"; a function of the tensor and a
    torch.Generator, both on the host, which writes it or returns its new content. A plain number changes only if it is
    named ("batch": it is the live batch), and a graph keeps that of its capture. Or one function of all arguments by
    name, on the host, and a torch.Generator, which writes them in place. What is not named is drawn within its least
    and greatest number, or permuted if its whole numbers are all different; prefix sums and integers of one value only
    are kept.

    `batch`: the inputs with a batch dimension: paths (dimension 0) or a mapping from paths to dimensions. The inputs as
    given are the captured batch; replays have smaller ones, for which eager work gets the first rows alone, and the
    rest of the graph's rows hold what was drawn, or `pads`: by path a number, or "last" (what the last live row holds).
    Sizes may be a multiple of the first one's, or one more, as prefix sums have.

    `writes`: inputs that `fn` writes in full, `updates`: those that it reads and writes, `scratch`: those whose content
    nobody reads afterwards. All others must stay as they are. `rounds`: replays, of which the first two have the inputs
    as given. `backend`: by default a CUDA graph if an input is on a GPU, else the emulated one.

    Returns what was seen. Raises NotLikeEager, an AssertionError, unless all replays were like eager work; if not
    `raises`, that is returned, too. Raises UsageError for arguments that are wrong or have no effect and if `fn` itself
    fails eagerly, NothingVerified if no input could change, DeviceLost if the device fails.
    """
    if type(rounds) is not int or rounds < FEWEST_ROUNDS:
        limit = f"an integer of {FEWEST_ROUNDS} or more, since the first two change nothing"
        raise UsageError(f"rounds: {rounds!r} must be {limit}")
    roles = {"writes": writes, "updates": updates, "scratch": scratch}
    with torch.no_grad():
        run = _Run(fn, inputs, change, batch, pads, roles, seed, backend)
        result = run.judge(rounds)
    if raises and not result.equal:
        raise NotLikeEager(result)
    return result


class _Run:
    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Any,
        change: object,
        batch: Mapping[str, int] | Iterable[str] | None,
        pads: Mapping[str, int | float | str] | None,
        roles: Mapping[str, Iterable[str]],
        seed: int,
        backend: Backend | None,
    ) -> None:
        self.name = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._call = Call.of(fn, inputs)
        tensors = tensors_by_path(self._call.values)
        if not tensors:
            raise UsageError("inputs: they hold no tensor; give a tuple, a mapping or a tensor")
        self._declared = Declared.of(tensors, batch, pads, roles)
        written = {path for path in tensors if self._declared.role(path) in ("writes", "scratch")}
        self._rules = Rules.of(change, tensors, self._call.values, written)
        if not self._rules.changed and self._rules.whole is None and self._declared.batch is None:
            raise NothingVerified(
                f"no input of {self.name} would change ({', '.join(self._rules.kept)} kept as given); name with "
                "change= what may change, and how"
            )
        self.device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
        self._backend = open_backend(self.device) if backend is None else backend
        self._generator = torch.Generator().manual_seed(seed)
        given = list(tensors.values())
        # Drawn on the host; on the device as drawn, with pads in them, and (`_static`) where the graph has them.
        self._source = _copied(self._call.values, Copies(given, device=torch.device("cpu")))
        self._drawn, self._padded = (_copied(self._call.values, Copies(given)) for _ in range(2))
        self._memory = Copies(given, guarded=True)
        self._static = _copied(self._call.values, self._memory)
        self._fixed = tensors_by_path(self._static)
        self._places = {path: Place.of(tensor) for path, tensor in self._fixed.items()}
        self._history = History()
        self._rounds, self._elements = 0, 0
        self._batches: list[int] = []
        self._results: set[tuple[int, ...]] = set()

    # Before the first round -------------------------------------------------------------------------------------------

    def judge(self, rounds: int) -> LikeEager:
        """Capture, and replay until something is wrong."""
        found = self._capture()
        while found is None and self._rounds < rounds:
            self._rounds += 1
            found = self._round(self._rounds - 1)
        return self._result(found)

    def _capture(self) -> Observation | None:
        """Run `fn` as an engine does before a capture, and capture it."""
        persistent = self._warm_up()
        self._write_static(self._declared.batch)
        returned: list[Any] = []
        try:
            self._graph: Graph = self._backend.capture(lambda: returned.append(self._call.run(self._static)))
        except CaptureError as error:
            return Observation(verdict="not captured", says=str(error))
        self._outputs = self._outputs_of(returned[0], self._static)
        if not self._outputs:
            raise UsageError(f"{self.name} returns no tensor and no input is declared with writes=: nothing to compare")
        self._output_places = {path: Place.of(tensor) for path, tensor in self._outputs.items()}
        known = persistent | {tensor.untyped_storage()._cdata for tensor in self._fixed.values()}
        self._poisoned = [t for t in self._outputs.values() if t.untyped_storage()._cdata not in known]
        self._poisoned += [t for path, t in self._fixed.items() if self._declared.role(path) in ("writes", "scratch")]
        return self._moved()

    def _warm_up(self) -> set[int]:
        """Run `fn` eagerly: on the smallest batch, on copies of the inputs, and on the static ones. Returns the
        storages of the results that it keeps for itself, which are the same in two calls."""
        smallest = 1 if self._declared.batch is not None else None
        calls = [self._eager(batch, 1, GIVEN) for batch in (smallest, self._declared.batch, self._declared.batch)]
        first, second = ({t.untyped_storage()._cdata for t in outputs.values()} for outputs, _ in calls[1:])
        self._write_static(self._declared.batch)
        self._run_eagerly(self._static, GIVEN)
        self._synchronize()
        return first & second

    # A round ----------------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> Observation | None:
        batch = self._draw(number)
        self._write_static(batch)
        for tensor in self._poisoned:
            fill(tensor, 0)
        about = f"round {number}" + (f" (batch {batch} of {self._declared.batch})" if batch is not None else "")
        try:
            with churned(self.device, 0):
                self._graph.replay()
            self._synchronize()
        except ReplayError as error:
            return Observation(verdict="not replayed", says=f"{about}: {error}")
        got = {path: _clone(tensor) for path, tensor in self._outputs.items()}
        found = self._harm(self._fixed, self._memory, "the replay", self._padded) or self._moved()
        if found is None:
            want, found = self._eager_and_harm(batch, 1, about)
            found = found or first_difference(got, want, self._history, batch != self._declared.batch)
            found = found or (self._twice(want, batch, about) if number % TWICE_EVERY == 0 else None)
            self._note(number, batch, want)
        return None if found is None else dataclasses.replace(found, says=f"{about}: {found.says}")

    def _draw(self, number: int) -> int | None:
        """Draw the inputs of a round into the source; return the live batch."""
        captured = self._declared.batch
        if number < 2:
            return captured
        batch = captured
        if captured is not None:
            drawn = int(torch.randint(1, captured + 1, (1,), generator=self._generator))
            batch = {2: 1, 3: captured}.get(number, drawn)
        if self._rules.whole is not None:
            self._rules.whole(self._source, self._generator)
        tensors = tensors_by_path(self._source)
        for path, rule in self._rules.tensors.items():
            if rule.changes:
                tensors[path].copy_(rule.redraw(tensors[path], self._generator))
        for name, rule in self._rules.numbers.items():
            self._source[name] = rule.number(self._call.values[name], batch, self._generator)
        return batch

    def _write_static(self, batch: int | None) -> None:
        """Write the source, with pads in it, into the static inputs. The source itself stays as it was drawn."""
        source, padded = tensors_by_path(self._source), tensors_by_path(self._padded)
        for path, tensor in tensors_by_path(self._drawn).items():
            if source.get(path) is None or source[path].shape != tensor.shape:
                raise UsageError(f"change: the function bound {path} to something of another shape; write it in place")
            _write(tensor, source[path])
            _write(padded[path], source[path])
        self._drawn |= {name: value for name, value in self._source.items() if isinstance(value, PLAIN)}
        for path, rows in self._declared.rows.items():
            if batch is not None:
                rows.reset_pads(padded[path], batch)
        for path, tensor in padded.items():
            _write(self._fixed[path], tensor)
        for guard in self._memory.guards():
            guard.fill_(GUARD_BYTE)

    def _eager(self, batch: int | None, poison: int, about: str) -> tuple[Outputs, Observation | None]:
        """Run `fn` on copies of what was drawn, cut to `batch`. Returns its results, and what else it wrote."""
        memory = Copies(list(tensors_by_path(self._drawn).values()), guarded=True)
        values = _copied(self._drawn, memory)
        if batch is not None and batch != self._declared.batch:
            values = self._cut(values, batch)
        given = tensors_by_path(values)
        for path, tensor in given.items():
            if self._declared.role(path) in ("writes", "scratch"):
                fill(tensor, poison)
        with PoisonedAllocations(poison):
            returned = self._run_eagerly(values, about)
        outputs = self._outputs_of(returned, values)
        return outputs, self._harm(given, memory, "eager work", self._drawn)

    def _eager_and_harm(self, batch: int | None, poison: int, about: str) -> tuple[Outputs, Observation | None]:
        with churned(self.device, poison):
            return self._eager(batch, poison, about)

    def _run_eagerly(self, values: dict[str, Any], about: str) -> Any:
        try:
            return self._call.run(values)
        except DeviceLost:
            raise
        except Exception as error:
            self._synchronize()
            what = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{self.name} failed when it was run eagerly, without a graph ({about}): {what}; "
                "say with change= which inputs are legal"
            ) from error

    def _cut(self, values: dict[str, Any], batch: int) -> dict[str, Any]:
        tensors = tensors_by_path(values)
        cut = {
            id(tensors[path]): tensors[path].narrow(rows.dimension, 0, rows.live(batch))
            for path, rows in self._declared.rows.items()
        }
        changed: dict[str, Any] = map_tensors(values, lambda tensor: cut.get(id(tensor), tensor))
        return changed

    def _outputs_of(self, returned: Any, values: dict[str, Any]) -> Outputs:
        found = {f"output{path}": tensor for path, tensor in tensors_in(returned).items()}
        written = {
            path: tensor
            for path, tensor in tensors_by_path(values).items()
            if self._declared.role(path) in ("writes", "updates")
        }
        return found | written

    # What is wrong besides outputs ------------------------------------------------------------------------------------

    def _harm(self, given: Outputs, memory: Copies, who: str, values: dict[str, Any]) -> Observation | None:
        """Look at the inputs that nobody may write, and at the memory beside all of them. `given`: those of a run, made
        from `values`."""
        source = tensors_by_path(values)
        for path, tensor in given.items():
            if self._declared.role(path) is None:
                numbers = Differing(*differing(tensor, narrow_like(source[path], tensor)).tolist())
                if numbers.differ:
                    index = unravel(numbers.first, tuple(tensor.shape))
                    got, was = shown(numbers, tensor.dtype)
                    says = f"{who} wrote the input {path}: {path}{index or ''} was {was} and is {got}"
                    text = f"{says}; {numbers.differ} of {tensor.numel()} elements differ"
                    return Observation(verdict="input written", says=text, path=path)
        guards = memory.guards()
        wrong = sum(int((guard != GUARD_BYTE).sum()) for guard in guards)
        if wrong:
            return Observation(verdict="wrote outside", says=f"{who} wrote {wrong} bytes beside the inputs")
        return None

    def _moved(self) -> Observation | None:
        now = tensors_by_path(self._static)
        for path, place in self._places.items():
            if path not in now:
                return Observation(verdict="moved", says=f"the input {path} was removed by the callable", path=path)
            if change := place.change_to(now[path]):
                return Observation(verdict="moved", says=f"the input {path} {change[1]}", path=path)
        for path, place in self._output_places.items():
            if change := place.change_to(self._outputs[path]):
                return Observation(verdict="moved", says=f"{path} {change[1]}", path=path)
        return None

    def _twice(self, want: Outputs, batch: int | None, about: str) -> Observation | None:
        """Run eager work again with the other poison, and once more with the same, to tell the two apart."""
        other, _ = self._eager_and_harm(batch, 0, about)
        found = first_difference(other, want, None, narrowed=False)
        if found is None:
            return None
        same, _ = self._eager_and_harm(batch, 1, about)
        if first_difference(same, want, None, narrowed=False) is None:
            says = "eager work has other results if memory that was only allocated holds other bytes"
            return dataclasses.replace(found, verdict="unwritten memory", says=f"{says}: {found.says}")
        says = "eager work has two results for the same inputs"
        return dataclasses.replace(found, verdict="not deterministic", says=f"{says}: {found.says}")

    # The result -------------------------------------------------------------------------------------------------------

    def _note(self, number: int, batch: int | None, want: Outputs) -> None:
        self._batches += [batch] if batch is not None else []
        self._elements += elements_of(list(want.values()))
        self._results.add(tuple(int(checksum(tensor)) for tensor in want.values()))
        self._history.add(number, want)

    def _synchronize(self) -> None:
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceLost(f"{self.device} failed in {self.name}, end this process: {error}") from error

    def _result(self, found: Observation | None) -> LikeEager:
        seen = {} if found is None else {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
        seen.pop("verdict", None)
        changed, kept = tuple(self._rules.changed), tuple(self._rules.kept)
        sentence = seen.pop("says", "")
        if found is None:
            sentence = f"{self._rounds} replays were like eager work, with {len(self._results)} different results"
            sentence += f"; kept as given: {', '.join(kept)}" if kept else ""
        return LikeEager(
            verdict=EQUAL if found is None else found.verdict,
            sentence=sentence,
            name=self.name,
            device=str(self.device),
            graph=self._backend.name,
            rounds=self._rounds,
            batches=tuple(self._batches),
            changed=changed if self._rules.whole is None else ("all, by change=",),
            kept=kept,
            elements=self._elements,
            distinct=len(self._results),
            **seen,
        )


def _copied(values: dict[str, Any], memory: Copies) -> dict[str, Any]:
    copied: dict[str, Any] = map_tensors(values, memory.of)
    return copied


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, also where several elements lie at one place, as in an expanded tensor."""
    if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.size(), strict=True)):
        once = [slice(0, 1) if step == 0 else slice(None) for step in target.stride()]
        target[tuple(once)].copy_(source[tuple(once)])
    else:
        target.copy_(source)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    return Copies([tensor]).of(tensor)
