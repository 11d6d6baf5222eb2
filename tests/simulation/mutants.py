"""Faults put back into the core on purpose, one at a time: the simulation has to see each of them.

    python -m simulation.mutants [--only NAME] [--steps 50000]     from the tests folder, or `make mutants`

Each is a replacement of text that must occur exactly once. It must be reached, and it must be caught within the steps
given; the unmutated code passes the same worlds. Exit 1 when any of this fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src" / "octavo"
SEED = 77


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in `file` below core/, `old` becomes `new`. fault: its id in docs/reliability.md."""

    name: str
    fault: str
    file: str
    old: str
    new: str


_SCHEDULER, _LIFECYCLE, _RESULTS, _BUILDER = "scheduler.py", "lifecycle.py", "result_processor.py", "output_builder.py"
_MANAGER, _POOL, _TRANSFERS = "kv_cache_manager.py", "block_pool.py", "kv_transfers.py"
MUTANTS = [
    Mutant("leak on abort", "F1", _LIFECYCLE, "        self._manager.free(request)\n        del", "        if status is not RequestStatus.FINISHED_ABORTED:\n            self._manager.free(request)\n        del"),
    Mutant("leak of the chain", "F1", _MANAGER, "        self._chains.pop(request.request_id, None)", "        pass"),
    Mutant("host blocks leak", "F1", _MANAGER, "            self.host.release(saved.host_blocks)", "            pass"),
    Mutant("double free", "F13", _MANAGER, "        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(table))\n        table.clear()", "        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(table))"),
    Mutant("one block too few at a border", "F17", _MANAGER, "        return -(-num_tokens // self.block_size)", "        return (num_tokens - 1) // self.block_size if num_tokens else 0"),
    Mutant("one block short", "F17", _MANAGER, "        num_new_blocks = max(self.num_blocks_for(num_tokens) - len(table)", "        num_new_blocks = max(self.num_blocks_for(num_tokens - 1) - len(table)"),
    Mutant("a hit covers the whole prompt", "F17", _MANAGER, "        source = found.pop() if num_found == num_tokens else self._find_partial(request, found)", "        source = self._find_partial(request, found)"),
    Mutant("a copy covers the whole prompt", "F17", _MANAGER, "            return ComputedBlocks(found, num_tokens - 1, source=source)", "            return ComputedBlocks(found, num_tokens, source=source)"),
    Mutant("a prompt's last block is not found", "C2", _MANAGER, "        return min(num_tokens // self.block_size, self.num_blocks_for(num_tokens - 1))", "        return (num_tokens - 1) // self.block_size"),
    Mutant("no pin at lookup", "F14", _MANAGER, "        self.pool.touch(computed.blocks)\n", "        pass\n"),
    Mutant("an uncommitted block is shared", "F16", _MANAGER, "        num_tokens = request.num_computed_tokens\n        if num_tokens", "        num_tokens = len(request.sequence.token_ids) // self.block_size * self.block_size\n        if num_tokens"),
    Mutant("rejected drafts are shared", "F16", _RESULTS, "        request.num_computed_tokens += count - num_rejected\n", "        request.num_computed_tokens += count\n"),
    Mutant("the salt is left out", "S18", _MANAGER, '            own = {"salt": request.cache_salt, "adapter": request.adapter}', '            own = {"adapter": request.adapter}'),
    Mutant("the adapter is left out", "F18", _MANAGER, '            own = {"salt": request.cache_salt, "adapter": request.adapter}', '            own = {"salt": request.cache_salt}'),
    Mutant("the weights' epoch is left out", "F18", _MANAGER, "        if not self.pool.reset():\n            return False\n        self._weights_epoch += 1\n", "        pass\n"),
    Mutant("stale drafts after a preemption", "F19", _LIFECYCLE, "        victim.num_computed_tokens = 0\n        victim.spec_token_ids = []", "        victim.num_computed_tokens = 0"),
    Mutant("drafts are kept after the step", "F19", _RESULTS, "        request.num_computed_in_all += count\n        request.spec_token_ids = []", "        request.num_computed_in_all += count"),
    Mutant("drafts beyond the end", "F12", _RESULTS, "                room = request.max_total_tokens - len(sequence.token_ids) - 1", "                room = 99"),
    Mutant("a victim's budget is not returned", "B4", "step_plan.py", "        self.budget += self.num_tokens.pop(request.request_id, 0)", "        self.num_tokens.pop(request.request_id, 0)"),
    Mutant("a victim stays in the step", "B4", _SCHEDULER, "        plan.take_back(victim)\n", "        pass\n"),
    Mutant("a victim is lost", "F9", _LIFECYCLE, "        self.room.put_back(victim)\n", "        pass\n"),
    Mutant("a victim is doubled", "F13", _LIFECYCLE, "        self.running.remove(victim)\n", "        pass\n"),
    Mutant("the worker is not told of a preemption", "F15", _LIFECYCLE, "        self._builder.preempted(victim.request_id)\n", "        pass\n"),
    Mutant("swapped back under the wrong length", "F15", _MANAGER, "        self._saved[request.request_id] = _Saved(host_blocks, request.num_computed_tokens)", "        self._saved[request.request_id] = _Saved(host_blocks, request.num_computed_tokens + 1)"),
    Mutant("swapped back into the wrong blocks", "F15", _MANAGER, "        targets = [block.block_id for block in new_blocks[: len(computed.host_blocks)]]", "        targets = [block.block_id for block in new_blocks[::-1][: len(computed.host_blocks)]]"),
    Mutant("swap believed after a failed step", "F15", _RESULTS, "            self._manager.drop_saved(request_id)  # nobody knows whether it was copied", "            pass"),
    Mutant("a late result is believed", "F4", _SCHEDULER, "        if result.step != scheduled.step or scheduled.step != self._open_step:", "        if result.step != scheduled.step:"),
    Mutant("a result is believed twice", "F4", _SCHEDULER, "            return []\n        self._open_step = None\n        self._batching", "            return []\n        self._batching"),
    Mutant("drafts behind a stop are kept", "F19", _RESULTS, "            request.num_computed_tokens = min(request.num_computed_tokens, len(request.sequence.token_ids) - 1)", "            pass"),
    Mutant("a failed step ends whoever has the id", "F20", _RESULTS, "            if request is not None and request.status is RequestStatus.RUNNING:\n                outputs", "            if request is not None:\n                outputs"),
    Mutant("head evicted first", "C2", _MANAGER, "        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(table))", "        self.pool.release(self.pool.blocks[block_id] for block_id in table)"),
    Mutant("tokens of the parked are not counted", "F28", "waiting_room.py", "        request = self.queue.pop_request()\n        self._parked", "        request = self.take()\n        self._parked"),
    Mutant("a failed load is believed", "F5", _RESULTS, "        if arrived:\n", "        if True:\n"),
    Mutant("transfer ids come round again", "F4", _TRANSFERS, "        self._next_id += 1", "        self._next_id = (self._next_id + 1) % 3"),
    Mutant("blocks freed while a load is under way", "F2", _MANAGER, "        blocks = [self.pool.blocks[block_id] for block_id in block_ids]\n        self.pool.touch(blocks)", "        blocks: list[Block] = []"),
    Mutant("a load never expires", "F7", _SCHEDULER, "        for request in self.transfers.expired(now):", "        for request in self.transfers.expired(-1.0):"),
    Mutant("a cancelled load is forgotten", "F2", _TRANSFERS, "        self._cancels.append(load.transfer_id)\n", "        pass\n"),
    Mutant("copied the wrong way round", "B1", _MANAGER, "            self._copies.block_copies.append((computed.source.block_id, new_blocks[0].block_id))", "            self._copies.block_copies.append((new_blocks[0].block_id, computed.source.block_id))"),
    Mutant("a block is not copied", "F16", _MANAGER, "        if computed.source is not None and computed.source is not new_blocks[0]:\n            self._copies", "        if False:\n            self._copies"),
    Mutant("a block is shared, not copied", "F16", _MANAGER, "            return ComputedBlocks(found, num_tokens - 1, source=source)", "            return ComputedBlocks([*found, source], num_tokens - 1)"),
    Mutant("a copy is found before it is made", "F16", _MANAGER, "            self._copies.block_copies.append((computed.source.block_id, new_blocks[0].block_id))", "            self._copies.block_copies.append((computed.source.block_id, new_blocks[0].block_id))\n            source, target = computed.source, new_blocks[0]\n            if source.hash and not source.ref_count:\n                content = (source.hash, source.token_ids, source.parent, source.extra_keys)\n                self.pool.evict(source)\n                self.pool.register(target, *content)"),
    Mutant("copies are made again with each step", "B1", _MANAGER, "        copies, self._copies = self._copies, BlockCopies()", "        copies = self._copies"),
    Mutant("a partial block outlives its owner", "F16", _MANAGER, "            del self._partials[chain.partial]\n            chain.partial = None", "            chain.partial = None"),
    Mutant("a hash is believed without its tokens", "S17", _POOL, "        if block is None or (block.token_ids, block.parent, block.extra_keys) != (token_ids, parent, extra_keys):", "        if block is None:"),
    Mutant("an evicted block can still be found", "F14", _POOL, "        del self._index[block.hash]\n", "        pass\n"),
    Mutant("admitted in a step that preempted", "B4", _SCHEDULER, "        reason = WaitReason.PREEMPTING if plan.preempted else plan.held_up", "        reason = plan.held_up"),
    Mutant("prompts do not give way", "E3", _SCHEDULER, "        return [request for request in self.running[first:] if is_prefill(request)]", "        return []"),
    Mutant("a prompt that gave way is overtaken", "E3", _SCHEDULER, "            if before is not None and rank(self.waiting.peek_request()) > rank(before):", "            if False:"),
    Mutant("no seat is counted", "F28", _SCHEDULER, "        return len(self.running) + len(self.transfers) + self.room.num_parked < self.config.max_num_seqs", "        return len(self.running) + len(self.transfers) <= self.config.max_num_seqs"),
    Mutant("a reservation is not returned", "F9", "admission.py", "        self.num_reserved_total -= num_tokens\n", "        pass\n"),
    Mutant("reserved after it was added", "F28", "admission.py", "        if self.num_reserved_total + request.max_total_tokens > self.max_total_tokens:", "        if self.num_reserved_total > self.max_total_tokens:"),
    Mutant("a request that can never fit is accepted", "F8", "admission.py", "        if num_prompt + 1 > capacity:", "        if num_prompt > capacity + 1:"),
    Mutant("who waits for a block waits for ever", "F9", "waiting_room.py", "            if is_coming and step < parked.until_step:\n                continue", "            continue"),
    Mutant("what is no longer computed is waited for", "F9", _MANAGER, "            if self._computing.get(block_hash) == request.request_id:\n                del self._computing[block_hash]\n        chain.num_committed", "            pass\n        chain.num_committed"),
    Mutant("the most important falls first", "F11", "policy.py", "    return max(candidates, key=rank) if candidates else None", "    return min(running, key=rank)"),
    Mutant("the protected fall, too", "F10", "policy.py", "    candidates = [r for r in running if r is not first and r.num_preemptions < max_preemptions]", "    candidates = [r for r in running if r is not first]"),
    Mutant("the budget is exceeded", "E1", "policy.py", "    if num_remaining <= budget:\n        return num_remaining\n", "    if num_remaining <= budget + 1:\n        return num_remaining\n"),
    Mutant("a far token costs like a near one", "E1", "policy.py", "        return min(math.ceil(count * self._per_position * position), budget - count)", "        return 0"),
    Mutant("a far token waits for a larger budget", "F9", "policy.py", "        return max(int(budget / (1 + self._per_position * position)), 1)", "        return int(budget / (1 + self._per_position * position))"),
    Mutant("prompts fill a step in which others decode", "E1", "policy.py", "                plan.lower_budget(sum(decoded) + max(self.prefill_limit, num_prompts))", "                pass"),
    Mutant("prompts take the tokens of who decodes behind them", "F11", "policy.py", "                plan.lower_budget(sum(decoded) + max(self.prefill_limit, num_prompts))", "                plan.lower_budget(sum(decoded) + self.prefill_limit)"),
    Mutant("what was learned of a step has no bounds", "E1", "policy.py", "            self._limit = min(max(change * self._limit, self._least), self._most)", "            self._limit = change * self._limit"),
    Mutant("a step is learned of that nobody shares", "E1", "policy.py", "        if not self._step_s or self._taken <= 0:", "        if not self._step_s:"),
    Mutant("prompts get more though they had enough", "E1", "policy.py", "        if change < 1 or self._was_short:", "        if True:"),
    Mutant("a slow step changes nothing", "E1", "policy.py", "        if change < 1 or self._was_short:", "        if change > 1 and self._was_short:"),
    Mutant("an ending is told twice", "F20", _SCHEDULER, "        outputs, self._news = self._news, []\n", "        outputs = list(self._news)\n"),
    Mutant("an abort takes a bystander's blocks", "F20", _POOL, "            block.ref_count -= 1\n            if block.ref_count == 0 and", "            block.ref_count = 0\n            if block.ref_count == 0 and"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: caught, survived, not reached, or no longer there; after how many steps, and by what."""

    mutant: Mutant
    outcome: str
    steps: int
    error: str


def apply(mutant: Mutant, folder: Path) -> bool:
    """Copy the package's source into `folder` and put the fault in; False when its text is not there exactly once."""
    shutil.copytree(SOURCE, folder / "octavo", ignore=shutil.ignore_patterns("assets", "__pycache__", "*.so"))
    path = folder / "octavo" / "core" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return False
    indent = mutant.old[: len(mutant.old) - len(mutant.old.lstrip(" "))]
    path.write_text(text.replace(mutant.old, f"{indent}__import__('sys').mutant_reached = True\n{mutant.new}"))
    return True


def judge(mutant: Mutant | None, steps: int) -> Verdict:
    """Run the simulation over a mutant, or over the code as it is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = mutant or Mutant("unmutated", "-", _SCHEDULER, "class Scheduler:", "class Scheduler:")
        if not apply(chosen, folder):
            return Verdict(chosen, "does not apply", 0, "")
        command = [sys.executable, "-S", "-m", "simulation", "--steps", str(steps), "--seed", str(SEED), "--no-shrink"]
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{TESTS}", "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False, cwd=TESTS, timeout=900
            )
        except subprocess.TimeoutExpired:
            return Verdict(chosen, "hangs", 0, "")
        try:
            report = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            return Verdict(chosen, "broken", 0, done.stderr[-300:])
    if "error" in report:
        return Verdict(chosen, "caught" if report["reached"] else "not reached", report["steps"], report["error"])
    return Verdict(chosen, "survived" if report["reached"] else "not reached", report["steps"], "")


def main() -> int:
    """Judge every mutant and print a table."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutants", description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--only", help="the name of one mutant, or a part of it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not args.only or args.only in mutant.name]
    good = True
    print("| fault | mutant | outcome | steps | seen as |\n|---|---|---|---|---|")
    with ThreadPoolExecutor(args.jobs) as pool:
        clean = pool.submit(judge, None, args.steps)
        for verdict in pool.map(judge, chosen, [args.steps] * len(chosen)):
            good &= verdict.outcome == "caught"
            seen = verdict.error[:80].replace("|", "/")
            print(
                f"| {verdict.mutant.fault} | {verdict.mutant.name} | {verdict.outcome} | {verdict.steps} | {seen} |",
                flush=True,
            )
        verdict = clean.result()
    print(f"| - | {verdict.mutant.name} | {verdict.outcome} | {verdict.steps} | {verdict.error} |")
    return 0 if good and verdict.outcome == "survived" and len(chosen) >= (1 if args.only else 30) else 1


if __name__ == "__main__":
    sys.exit(main())
