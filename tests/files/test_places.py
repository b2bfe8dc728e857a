"""Every place in kumi that opens a file by itself, and the reason why it does not use `kumi.files`."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "kumi"

# Methods and functions that open a file, whatever they are called on, and those of certain modules.
METHODS = {
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "touch",
    "memmap",
    "fromfile",
    "from_file",
    "fdopen",
    "load_file",
    "save_file",
    "safe_open",
    "ParquetFile",
    "read_table",
    "from_pretrained",
    "save_pretrained",
    "ZipFile",
    "GzipFile",
    "BZ2File",
    "LZMAFile",
    "FileIO",
    "unsafe_load",
}
OF_MODULES = {
    "json": {"load", "loads"},
    "tomllib": {"load", "loads"},
    "torch": {"load", "save"},
    "np": {"load", "save"},
    "pickle": {"load", "loads", "Unpickler"},
    "shutil": {"copy", "copy2", "copyfile", "copytree"},
    "zlib": {"decompress"},
    "gzip": {"decompress"},
    "bz2": {"decompress"},
    "lzma": {"decompress"},
}
FUNCTIONS = {"open", "load_file", "save_file", "safe_open", "memmap", "fromfile"}

# By reason, the places: file, then the function or functions in it.
REASONS: dict[str, list[str]] = {
    "the door itself": [
        "files/untrusted.py open_regular open_stream parse_toml",
        "files/output.py open_new open_append",
    ],
    "files of the system, in /proc and /sys": [
        "config/local_machine.py _cpuinfo _memory",
        "process_limits.py free_memory _left_in_groups _left",
        "data/chat/limits.py __init__",
        "launch/oom.py oom_kills _files",
        "launch/stop_file.py process_age",
        "train/folder_lock.py _machine",
        "launch/ssh.py _is_alive",
        "launch/standing.py _read",
        "launch/watch.py _process_state",
        "doctor/network_checks.py machine_id",
        "train/process_memory.py baseline_memory _resident_bytes",
        "train/cpu_contention.py cpu_wait_seconds",
        "validation/failures_part.py _little_memory",
        "safe_output.py _open_descriptor",
        "rewards/sandbox/control_groups.py _own_paths _works processes _limit",
    ],
    "files that come with the package": [
        "config/presets.py read_machine_toml",
        "cli/init.py recipe_files recipes",
        "plan/uncertainty/error_table.py published_runs",
    ],
    "a message from a process that kumi started, by its pipe or the store of the launch": [
        "launch/rendezvous.py _failure",
        "train/start.py _join",
        "data/bpe.py _main",
        "json_worker.py read",
        "rewards/reward_worker.py _main",
        "data/stock_worker.py _main",
        "plan/search/worker_process.py _main",
        "plan/search/workers.py _ask",
        "data/tokenize_worker.py _main",
        "data/preparation.py _raise_worker_error",
        "bench/run_bench.py _measure",
        "bench/measuring_rank.py measure_rank",
        "train/child_process.py main _follow",
        "storage/mirror_process.py main finish",
        "launch/rank_process.py _redirect_output",
        "train/measure_numerics.py _run_measurement",
        "evaluation/run_evaluation.py _evaluate evaluate_rank",
        "validation/run_parts.py _run _result",
        "validation/part_process.py _main",
        "validation/several_part.py _in_ranks",
    ],
    "a run or a trace in a temporary folder of the process": [
        "validation/audit_part.py rows_of_profile",
        "validation/failures_part.py _losses",
    ],
    "the launcher's own temporary folder, which nobody else may write to": [
        "launch/control_folder.py control_folder _remove_stale announce_rank read_pids release_ranks report_failure "
        "read_failures _publish",
        "launch/failure_causes.py _exception_message",
    ],
    "the answer of a program that the user has installed": [
        "launch/kubernetes.py state",
        "launch/skypilot.py state",
        "rewards/sandbox/interpreter.py interpreter_at",
    ],
    "a URL, whose answer is bounded": ["rewards/http_request.py _post"],
    "a file that torchrun names and reads": ["launch/rendezvous.py _write_error_file"],
    "an output file that the user names": [
        "bench/cluster_toml.py write_new",
        "cli/plan_files.py _write",
        "cli/init.py _write",
    ],
    "a file in a folder that was made for it just now": [
        "convert/hf/adapter_write.py write_adapter",
        "convert/hf/passthrough.py write_spans",
        "convert/megatron/dcp_write.py write_dcp _write_pieces _write_objects _archive",
        "convert/hf/write_folder.py write_hf_folder _write_json",
        "convert/megatron/write_megatron.py write_megatron_folder _write_json",
        "convert/kumi_checkpoint.py write_model",
        "convert/files/safetensors_write.py create put sync",
        "convert/files/stream.py _open_for_writing",
        "rewards/sandbox/probes.py _files",
    ],
    "a rank's log, opened with O_NOFOLLOW": ["launch/rank_process.py run_rank"],
    "a new file of optimizer states, opened with O_EXCL": ["parallel/optim/nvme_store.py open_nvme_store"],
    "a file of a store, by fsspec": ["remote/part_upload.py _stream"],
    "a folder, to sync it": ["storage/folders.py sync_folder"],
    "kumi's own checkpoint reader, which uses the door": [
        "convert/kumi_checkpoint.py open_saved_model",
        "train/resume.py resume_notes last_checkpoint",
    ],
    "a record in an archive, in memory, that the door opened": ["convert/megatron/pickles.py _archive"],
    "a value in a data path that the user wrote": ["data/gym_source.py _value"],
    "kumi's own data in a value of a configuration": ["spec/families/_shared/vision_language.py to_hf"],
    "tool arguments of a row that the door opened": ["data/chat/as_generated.py _check_text"],
    "a copy of what is in memory": [
        "convert/vocab/edit.py _tokenizer_json",
        "storage/checkpoint.py save",
        "data/row_path.py _encoder",
        "rewards/scorer.py _content",
        "data/gym_task.py _row _dataset",
        "data/chat/control_tokens.py without_added_tokens",
    ],
    "a file that was checked just before, mapped into memory": [
        "data/binfile.py open_file",
        "data/checksums.py _map_file",
        "data/packing/bins_file.py open_bins",
    ],
    "a stream that the door opened": [
        "data/reference_file.py read_sums",
        "data/unit_files.py _map_tokens _map_columns",
        "data/records.py parquet_groups _parquet",
        "data/arrow_rows.py column_names group_rows _parquet_batches",
    ],
    "the trained model's logits, written by this run in its folder, in which no link is followed": [
        "train/finish.py _difference",
        "train/export_probe.py write_probe",
    ],
    "a folder that kumi wrote just now, read by transformers to compare": ["convert/verify.py _transformers_logits"],
    "kumi's own code": ["validation/shareable.py own_words"],
}


def _opens(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in FUNCTIONS
    if not isinstance(function, ast.Attribute):
        return False
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    return function.attr in METHODS or function.attr in OF_MODULES.get(module, ())


def _places(node: ast.AST, name: str) -> set[str]:
    """The names of the functions in `node` that open a file."""
    places = {name} if isinstance(node, ast.Call) and _opens(node) else set()
    for inner in ast.iter_child_nodes(node):
        places |= _places(inner, inner.name if isinstance(inner, ast.FunctionDef) else name)
    return places


def test_every_place_that_opens_a_file_outside_the_door_has_a_reason():
    given = {
        (file, function)
        for places in REASONS.values()
        for place in places
        for file, *names in [place.split()]
        for function in names
    }
    places = {
        (str(file.relative_to(SOURCE)), function)
        for file in SOURCE.rglob("*.py")
        for function in _places(ast.parse(file.read_text()), "module")
    }
    assert sorted(places - given) == [], "open it through kumi.files, or give the reason here"
    assert sorted(given - places) == [], "no longer open a file: take them out of the table"


def test_a_new_place_is_seen():
    for text in (
        "open(x)",
        "Path(x).read_text()",
        "json.load(f)",
        "np.memmap(x)",
        "torch.load(x)",
        "gzip.open(x)",
        "os.open(x, 0)",
        "tomllib.load(f)",
        "safe_open(x)",
        "AutoModel.from_pretrained(x)",
    ):
        assert _places(ast.parse(f"def f():\n    def g():\n        return {text}"), "module") == {"g"}
    assert _places(ast.parse("read_bytes(folder, name); json.dumps(x)"), "module") == set()
