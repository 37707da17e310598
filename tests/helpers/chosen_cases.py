"""Which cases run, how and in what order: options, marks by time, workers, what is skipped; `conftest.py` loads it."""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from edgellm.kernels.gpu import find_gpu


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sample`, for tools that make tests slow; see `tools/bench/sanitize.py`. `--as`: see
    `tools/bench/as_device.py`. `--gpus 2`: every model that two ranks can share is opened so on NumPy."""
    parser.addoption(
        "--sample", type=int, metavar="COUNT", help="run only so many of the selected tests, evenly spread"
    )
    parser.addoption("--gpus", type=int, metavar="N", help="models on NumPy are shared by N ranks where they can be")
    parser.addoption(
        "--as",
        dest="measured_as",
        metavar="NAME",
        help="in a part of the GPU, with the limits and code of a device; tests have no neighbour",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure as on a device where that is asked for."""
    if config.getoption("gpus") is not None:
        _share_models(config.getoption("gpus"))
    name = config.getoption("measured_as")
    if name is not None:
        from tools.bench.as_device import ModeError, enter

        try:
            enter(name)
        except ModeError as error:
            raise pytest.UsageError(f"--as {name}: {error}") from error


def _share_models(count: int) -> None:
    from edgellm.engines.backends import opening
    from edgellm.engines.errors import EngineError

    opened = opening.open_backend

    def shared(name: str, directory: Any, *others: Any, gpus: int = 1, **named: Any) -> Any:
        """As `open_backend`, with as many GPUs."""
        gpus = others[2] if len(others) > 2 else gpus
        wanted = max(count, gpus) if directory.models.get("base") is not None else gpus
        try:
            return opened(name, directory, *others[:2], gpus=wanted, **named)
        except EngineError as error:
            if "shared" not in str(error):
                raise
            return opened(name, directory, *others[:2], gpus=gpus, **named)

    for module in [each for each in sys.modules.values() if vars(each).get("open_backend") is opened]:
        module.open_backend = shared  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a run of neighbours, which share fixtures, and take from the slower one at the end; with
    `--dist` as it says."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A test for which the device that is measured has too little shared memory is skipped, with the reason."""
    report = yield
    name = item.config.getoption("measured_as")
    if name is not None and report.failed and item.get_closest_marker("gpu"):
        reason = str(call.excinfo.value).partition("\n")[0]
        if "bytes of shared memory" in reason:
            report.outcome = "skipped"
            report.longrepr = str(item.path), item.location[1] or 0, f"Skipped: not on {name}: {reason}"
    return report


#: Folders and files whose tests take a minute in all: those marked `fast`, for the edit loop.
FAST = (
    "kernels",
    "engines/backends",
    "engines/checkpoints",
    "engines/directories",
    "engines/families",
    "engines/model",
    "engines/runners",
    "drafting",
    "text",
    "test_import_rule.py",
    "test_llm.py",
    "test_sampling_params.py",
)
#: Of these the files that take longer.
NOT_FAST = (
    "drafting/test_learner.py",
    "engines/backends/test_tensorrt_operations.py",
    "engines/model/test_draft_networks.py",
    "kernels/acceptance/test_acceptance_lossless.py",
    "kernels/test_kernels_compiler.py",
    "text/test_text_template_attacks.py",
)

#: Files whose `slow` cases take seconds, which are marked `ci`.
SECONDS = ("engines/building/test_kernel_build.py",)

#: Files, and tests of others, whose cases are families times drafts, or the like: a twentieth of each test's cases, and
#: a fourth of those on a GPU, show as many of the values as so many can, the others are `slow`.
SAMPLED = (
    "commands/test_commands_convert.py::test_signals_leave_nothing",
    "commands/test_gguf_images.py::test_an_image_is_seen_as_by_the_published_model",
    "commands/test_hostile_models.py",
    "commands/test_hostile_settings.py",
    "engines/backends/test_encoder_engine.py::test_equals_operations",
    "engines/backends/test_encoder_engine.py::test_speech_equals_operations_in_the_engine_of_a_whole_window",
    "engines/backends/test_kernel_engine.py::test_a_decode_step_is_what_operations_compute",
    "engines/backends/test_kernel_engine.py::test_a_step_of_a_draft_is_what_operations_compute",
    "engines/backends/test_kernel_engine.py::test_adapters_are_applied_as_operations_apply_them",
    "engines/backends/test_kernel_engine.py::test_adapters_take_the_inputs_of_packed_layers_as_they_were",
    "engines/backends/test_kernel_engine.py::test_inputs_of_packed_layers_are_permuted_and_scaled",
    "engines/backends/test_kernel_engine.py::test_inputs_of_packed_layers_of_a_draft_are_permuted_and_scaled",
    "engines/backends/test_kernel_engine.py::test_mixtures_of_experts_are_what_operations_compute",
    "engines/backends/test_kernel_engine.py::test_verified_tokens_and_features_are_what_operations_compute",
    "engines/backends/test_kernel_launches.py",
    "engines/backends/test_kernel_ranks.py::test_a_step_of_ranks_is_what_operations_compute_of_the_whole",
    "engines/backends/test_kernel_ranks.py::test_launches_of_a_rank_are_prepared",
    "engines/backends/test_planned_encoders.py::test_a_refused_step_costs_that_step_alone_in_every_shape",
    "engines/backends/test_planned_encoders.py::test_every_kind_of_step_may_stand_between_kernels",
    "engines/backends/test_planned_encoders.py::test_every_second_step_is_what_the_whole_program_gives",
    "engines/backends/test_planned_encoders.py::test_every_step_that_tensorrt_has_can_be_planned_alone",
    "engines/backends/test_planned_encoders.py::test_kernels_stand_around_plans",
    "engines/backends/test_planned_steps.py::test_a_prompt_is_what_the_whole_program_gives",
    "engines/backends/test_planned_steps.py::test_drafts_are_what_the_whole_program_gives",
    "engines/backends/test_planned_steps.py::test_packed_weights_give_what_their_values_do",
    "engines/backends/test_planned_steps.py::test_steps_of_few_rows_are_what_the_whole_program_gives",
    "engines/backends/test_prompt_executor.py::test_gives_what_the_whole_program_does",
    "engines/backends/test_prompt_executor.py::test_packed_weights_whose_inputs_are_arranged_give_what_their_values_do",
    "engines/backends/test_tensorrt_operations.py::test_every_phase_of_every_family_builds",
    "engines/backends/test_tensorrt_operations.py::test_operations_of_vision_encoders_build",
    "engines/building/test_block_build.py::test_answers_are_those_of_plain_decoding",
    "engines/building/test_draft_weights.py::test_kernels_run_every_step_of_a_packed_draft_on_every_device",
    "engines/building/test_family_builds.py::test_a_directory_keeps_what_was_read",
    "engines/building/test_family_builds.py::test_published_files_keep_their_bytes",
    "engines/building/test_family_builds.py::test_tensorrt_builds_what_a_family_varies",
    "engines/building/test_kernel_build.py::test_mixtures_bring_the_kernels_of_their_experts",
    "engines/building/test_kernel_build.py::test_recurrent_models_bring_what_commits_their_states",
    "engines/building/test_mtp_build.py::test_the_head_beside_packed_layers",
    "engines/building/test_packed_heads.py::test_answers_are_those_of_a_dense_head_of_the_same_values",
    "engines/building/test_packed_heads.py::test_heads_of_models_that_take_images",
    "engines/building/test_recurrent_build.py::test_a_directory_is_built_and_its_kernels_compile",
    "engines/building/test_vision_build.py::test_every_family_builds",
    "engines/building/test_window_build.py::test_a_directory_is_built_and_its_kernels_compile",
    "engines/checkpoints/test_finite_weights.py::test_a_model_with_one_bad_value_is_refused",
    "engines/checkpoints/test_finite_weights.py::test_the_command_names_file_tensor_and_place",
    "engines/families/test_families_kernels.py::test_decoded_tokens_have_the_logits_of_transformers",
    "engines/families/test_families_logits.py::test_chunks_equal_the_whole",
    "engines/families/test_families_logits.py::test_every_prefix_then_single_tokens",
    "engines/families/test_families_logits.py::test_what_a_family_has_of_its_own_would_be_missed",
    "engines/families/test_family_answers.py::test_greedy_tokens_are_those_of_transformers",
    "engines/families/test_family_answers.py::test_packed_and_drafted_answers_are_those_of_the_dense_twin",
    "engines/families/test_family_answers.py::test_sequences_of_different_lengths_in_one_batch",
    "engines/families/test_family_answers.py::test_trees_give_the_tokens_of_plain_decoding",
    "engines/families/test_gemma3_with_images.py::test_a_directory_is_built_and_its_kernels_compile",
    "engines/families/test_gguf_families.py::test_no_value_of_metadata_does_more_than_an_error",
    "engines/families/test_image_logits.py::test_a_text_after_a_prompt_with_images_is_not_displaced",
    "engines/families/test_image_logits.py::test_chunks_equal_the_whole_wherever_they_cut_images",
    "engines/families/test_image_logits.py::test_every_prefix_can_be_reused_even_half_an_image",
    "engines/families/test_image_logits.py::test_slots_of_one_batch_keep_their_own_positions",
    "engines/families/test_mixtures.py::test_kernels_run_mixtures_or_refuse_them_by_name",
    "engines/families/test_mixtures.py::test_packed_answers_are_those_of_the_dense_twin",
    "engines/families/test_mixtures.py::test_sessions_snapshots_adapters_and_drafts",
    "engines/families/test_recurrent_families.py::test_chunks_and_steps_leave_the_same_states",
    "engines/families/test_recurrent_families.py::test_every_prefix_then_steps",
    "engines/families/test_recurrent_families.py::test_greedy_tokens_equal_transformers",
    "engines/families/test_recurrent_families.py::test_nodes_of_trees_equal_steps_along_their_paths",
    "engines/families/test_recurrent_families.py::test_sequences_in_a_batch_are_what_they_are_alone",
    "engines/families/test_recurrent_kernels.py::test_prompts_and_steps_have_the_logits_of_transformers",
    "engines/families/test_recurrent_kernels.py::test_trees_are_what_steps_along_their_paths_are",
    "engines/families/test_vision_goldens.py::test_embeddings_are_those_of_transformers",
    "engines/families/test_whole_images.py::test_trees_give_the_tokens_of_plain_decoding",
    "engines/lora/test_lora_build.py::test_every_phase_of_every_family_builds",
    "engines/lora/test_lora_eagle.py::test_drafting_changes_no_token_under_an_adapter",
    "engines/lora/test_lora_llm.py",
    "engines/lora/test_lora_logits.py::test_a_prefix_then_single_tokens",
    "engines/model/test_draft_decoder.py::test_verifying_a_tree_equals_running_each_path",
    "engines/model/test_draft_networks.py::test_every_draft_engine_builds",
    "engines/model/test_draft_networks.py::test_the_edge_of_every_engine",
    "engines/model/test_sharding.py::test_ranks_give_the_logits_of_transformers_and_the_same_ones_again",
    "engines/model/test_sharding.py::test_states_of_recurrent_layers_are_shared_and_lie_as_those_of_one",
    "engines/quantization/test_mixed_projections.py::test_any_products_have_the_logits_of_transformers",
    "engines/quantization/test_packed_answers.py::test_images_with_a_dense_tower",
    "engines/quantization/test_packed_experts.py::test_packed_experts_are_their_dense_twin",
    "engines/quantization/test_published_layouts.py::test_each_weight_has_the_bits_that_the_package_gives_it",
    "engines/quantization/test_quantized_experts.py::test_each_expert_is_packed_by_itself",
    "engines/quantization/test_quantized_experts.py::test_gpt_oss_s_stacks_are_turned_and_keep_gate_and_up_in_turn",
    "engines/quantization/test_quantizer.py::test_a_killed_run_goes_on_where_it_stopped",
    "engines/quantization/test_quantizer.py::test_every_family_computes_nearly_what_it_did",
    "engines/quantization/test_rounding.py::test_each_group_has_the_least_error_that_there_is",
    "engines/quantization/test_scaling.py",
    "engines/runners/test_following_logits.py::test_they_are_those_of_decode_steps",
    "engines/runners/test_image_chunks.py::test_no_chunk_has_a_part_of_an_image",
    "engines/runners/test_media_kinds.py::test_a_second_kind_has_the_rows_and_positions_of_text",
    "engines/speculation/test_block_rounds.py::test_drafted_answers_are_those_of_plain_decoding",
    "engines/speculation/test_constrained_equality.py",
    "engines/speculation/test_drafted_answers.py",
    "engines/speculation/test_eagle_equality.py::test_a_changing_mixture_of_plans_and_plain_steps",
    "engines/speculation/test_eagle_equality.py::test_one_slot",
    "engines/speculation/test_eagle_equality.py::test_sampled_chains_are_greedy_at_temperature_0",
    "engines/speculation/test_eagle_equality.py::test_slots_of_different_lengths_and_samplings",
    "engines/speculation/test_eagle_equality.py::test_typical_acceptance_is_exact_at_temperature_0_and_takes_fewer_steps_above",
    "engines/speculation/test_fixed_shapes.py",
    "engines/speculation/test_gemma4_rounds.py",
    "engines/speculation/test_given_rounds.py",
    "engines/speculation/test_image_rounds.py::test_images_of_embeddings_are_text",
    "engines/speculation/test_image_rounds.py::test_rounds_give_the_tokens_of_plain_decoding",
    "engines/speculation/test_image_rounds.py::test_rounds_of_a_head_inside_the_checkpoint",
    "engines/speculation/test_image_rounds.py::test_rows_of_prefill_and_of_rounds_are_the_same",
    "engines/speculation/test_many_hybrid_rounds.py::test_states_after_rounds_are_those_of_plain_decoding",
    "engines/speculation/test_recurrent_rounds.py",
    "engines/speculation/test_steps_ahead.py",
    "engines/speculation/test_suffix_answers.py",
    "engines/speculation/test_suffix_index.py::test_proposals_are_those_of_brute_force",
    "http/test_anthropic_client.py::test_calls_are_those_of_python",
    "http/test_proxies.py::test_a_killed_server",
    "http/test_proxies.py::test_a_server_that_ends_loses_nothing",
    "http/test_proxies.py::test_without_any_server_there_is_an_error_of_openai_s_form",
    "http/test_tools.py::test_calls_are_those_of_python",
    "kernels/acceptance/test_acceptance_lossless.py",
    "kernels/decode/test_decode_attention.py",
    "kernels/decode/test_packed_tiles.py::test_tiles_fit_every_gpu",
    "kernels/prefill/test_prompt_linear.py::test_large_tiles_of_packed_weights_stay_in_registers",
    "kernels/prefill/test_prompt_linear.py::test_large_tiles_stay_in_registers",
    "kernels/quantization/test_device_layout.py::test_a_weight_comes_back",
    "kernels/quantization/test_device_layout.py::test_a_weight_of_a_gguf_file_comes_back",
    "kernels/quantization/test_device_layout.py::test_a_weight_of_another_dtype_comes_back",
    "kernels/recurrent/test_recurrent.py::test_matrices_have_the_same_bits_in_chains_trees_chunks_and_commits",
    "kernels/sampling/test_sampling.py::test_filter_keeps_what_a_sort_based_filter_keeps",
    "kernels/sampling/test_sampling.py::test_samples_follow_softmax",
    "kernels/test_window_attention.py::test_prompts_have_what_decode_steps_have",
    "kernels/test_window_attention.py::test_tokens_of_trees_see_their_windows",
    "multimodal/test_image_processor.py::test_rows_equal_those_of_the_published_processors_bit_for_bit",
    "serving/test_asynchronous.py::test_many_tasks_without_threads",
    "serving/test_chunk_callbacks.py::test_a_callback_cannot_use_the_runtime_that_calls_it",
    "serving/test_chunk_callbacks.py::test_a_callback_that_raises_ends_its_request_alone",
    "serving/test_chunk_callbacks.py::test_an_interrupt_frees_the_slots_where_the_step_under_way_fails",
    "serving/test_chunk_callbacks.py::test_an_interrupt_in_a_callback_unwinds_everything",
    "serving/test_chunk_callbacks.py::test_callbacks_while_steps_run_ahead",
    "serving/test_chunk_callbacks.py::test_one_request",
    "serving/test_chunk_callbacks.py::test_rows_are_not_kept_where_the_step_under_way_fails",
    "serving/test_chunk_callbacks.py::test_several_have_each_their_own",
    "serving/test_chunk_callbacks.py::test_those_that_run_together_take_turns",
    "serving/test_chunk_callbacks.py::test_what_waits_is_answered_where_the_engine_fails_twice",
    "serving/test_concurrency.py::test_cancellations_deadlines_and_errors_among_many_threads",
    "serving/test_constrained_answers.py",
    "serving/test_logprobs.py",
    "serving/test_long_conversations.py::test_a_conversation_goes_on_for_ever",
    "serving/test_nothing_later.py::test_nothing_is_made_after_opening",
    "serving/test_nothing_later.py::test_nothing_is_made_for_a_sound_after_opening",
    "serving/test_preempted_answers.py",
    "serving/test_preempted_images.py",
    "serving/test_preempted_rows.py",
    "serving/test_priorities.py::test_a_grammar_that_fails_when_it_goes_on_is_the_failure_of_that_request_alone",
    "serving/test_priorities.py::test_an_emergency_waits_for_one_round_at_most",
    "serving/test_priorities.py::test_one_that_waits_is_ended_at_once_with_what_it_has",
    "serving/test_recurrent_conversations.py",
    "serving/test_recurrent_images.py",
    "serving/test_runtime.py",
    "serving/test_service.py",
    "serving/test_slot_choice.py",
    "serving/test_stop_when.py",
    "serving/test_window_conversations.py",
    "snapshots/test_image_snapshots.py",
    "snapshots/test_llm_snapshots.py",
    "snapshots/test_recurrent_snapshots.py",
    "snapshots/test_rows_beside.py",
    "snapshots/test_slot_snapshots.py",
    "structure/test_random_schemas.py::test_whole_answers_are_valid_by_an_independent_judge",
    "speech/test_speech_model.py::test_a_backend_hears_what_numpy_hears",
    "tool_calls/test_single_arguments.py::test_every_call_that_the_grammar_allows_is_read_whole_and_valid",
    "tool_calls/test_structured_calls.py::test_an_answer_is_calls_or_text_and_is_read_so",
    "tool_calls/test_thinking_families.py::test_a_model_thinks_before_a_call_that_is_enforced",
    "tool_calls/test_thinking_families.py::test_a_picture_is_thought_about_before_a_call",
    "tool_calls/test_tool_reader.py::test_text_with_quotes_that_nobody_escaped_is_read_whole_or_an_error",
    "tools/test_as_device.py::test_shapes_that_the_device_sends_to_tensorrt_get_plans",
    "tools/test_as_device.py::test_without_a_gpu_the_error_says_so",
    "tools/test_demo_adapters.py::test_shipped_adapters_answer_held_out_prompts_in_their_style",
    "tools/test_random_model.py::test_a_random_gguf_file_of_a_mixture_is_read_as_its_model",
    "tools/test_random_model.py::test_a_sequence_begins_anew_on_the_rows_of_its_prompt",
    "tools/test_random_model.py::test_forms_of_packed_layers_are_tried_shape_by_shape",
    "tools/test_random_model.py::test_rounds_of_hybrid_models_get_the_lengths_that_are_simulated",
    "vision/test_llm_images.py",
    "tools/test_shipped_vision.py::test_questions_that_name_the_picture",
    "tools/test_shipped_vision.py::test_what_is_on_a_sample_scene",
    "vision/test_runtime_images.py::test_answers_are_the_same_drafted_or_not_reused_or_not",
    "vision/test_runtime_whole_images.py",
    "vision/test_tiled_images.py::test_a_kept_system_prompt_shows_all_parts_of_its_picture",
    "vision/test_tiled_images.py::test_a_model_answers_as_transformers_does",
    "vision/test_tiled_images.py::test_every_prefix_has_the_logits_of_transformers",
    "vision/test_videos.py::test_openais_client_shows_a_file",
)


def a_part(cases: Sequence[pytest.Item], part: int) -> list[pytest.Item]:
    """One of `part` of a test's cases, at least one of any, and the same ones every time: one after another that which
    has the most words in its name that none before it has; of equals the checksum of the whole name decides, for each
    test anew."""
    words = {case: set(re.findall(r"[\w.]+", case.nodeid.partition("[")[2])) for case in cases}
    left = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    chosen: list[pytest.Item] = []
    seen: set[str] = set()
    while part * len(chosen) < len(cases):
        best = max(left, key=lambda case: len(words[case] - seen))
        left.remove(best)
        chosen.append(best)
        seen |= words[best]
    return chosen


def mark_by_time(items: Sequence[pytest.Item]) -> None:
    """Mark what of many like cases is slow, what of all that is slow takes seconds, and what is fast."""
    many: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        path = name.partition("::")[0]
        if item.get_closest_marker("slow"):
            if path in SECONDS:
                item.add_marker(pytest.mark.ci)
        elif path in SAMPLED or name in SAMPLED:
            many.setdefault(name, []).append(item)
    for cases in many.values():
        on_gpu = {case for case in cases if case.get_closest_marker("gpu")}
        chosen = {*a_part([case for case in cases if case not in on_gpu], 20), *(on_gpu & {*a_part(cases, 4)})}
        for item in set(cases) - chosen:
            item.add_marker(pytest.mark.slow)
    for item in items:
        path = item.nodeid.removeprefix("tests/").partition("::")[0]
        if path.startswith(FAST) and path not in NOT_FAST and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.fast)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> list[Any] | None:
    """Of files whose tests are all marked `gpu`, a quarter of all cases, none are made where those are left out; that
    they can be imported still shows."""
    module = collector.getparent(pytest.Module)
    is_for_gpus = module is not None and getattr(module.obj, "pytestmark", None) == pytest.mark.gpu
    return [] if is_for_gpus and collector.config.getoption("markexpr").endswith("not gpu") else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests before they are selected. Of what is selected, skip tests marked `gpu` where they cannot run, with the
    reason; those that have to be alone come last."""
    mark_by_time(items)
    yield
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    count = config.getoption("sample")
    if count is not None and count < len(items):
        items[:] = [items[index * len(items) // count] for index in range(count)]
    if find_gpu() is None:
        reason = "no NVIDIA GPU (no driver, or it shows no device)"
    elif importlib.util.find_spec("pycuda") is None:
        reason = "pycuda is not installed: pip install '.[gpu]'"
    else:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Thousands of tests stay till the end: no collection of garbage walks them, which took a fifth of the time in
    which they are found and a tenth of all the others."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found
