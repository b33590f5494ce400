"""Every promise of docs/errors.md has tests by name."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

PROMISES = {
    "Python code beside a checkpoint is never run": [
        "app/test_bad_input.py::test_bad_input_is_refused_in_one_line",
        "models/test_load.py::test_pickled_weights_load_and_no_code_runs",
        "models/test_odd_models.py::test_attention_that_a_checkpoint_names_is_not_followed",
    ],
    "Files outside a checkpoint's folder": [
        "models/test_inside_folder.py::test_a_file_of_a_checkpoint_that_waits_or_has_no_end_is_refused",
        "models/test_inside_folder.py::test_no_pipe_may_stand_beside_the_weights",
        "models/test_inside_folder.py::test_weights_outside_the_folder_are_not_read",
        "models/test_inside_folder.py::test_weights_inside_the_folder_are_read",
        "models/test_inside_folder.py::test_links_of_the_cache_of_the_hub_are_followed",
        "models/test_inside_folder.py::test_the_files_of_a_tokenizer_stay_inside",
        "models/test_inside_folder.py::test_a_configuration_names_no_weights_outside",
        "app/test_openers.py::test_nothing_that_waits_or_has_no_end_is_opened",
        "app/test_openers.py::test_a_regular_file_is_read_through_links",
        "app/test_openers.py::test_a_file_beyond_the_bound_is_refused",
        "measure/test_not_finite.py::test_every_use_of_a_live_model_names_the_tensor",
        "measure/test_not_finite.py::test_a_folder_names_it_too",
    ],
    '<a id="files"></a>A file is written beside its place': [
        "files/test_kept.py::test_a_file_is_written_whole_or_not_at_all",
        "app/test_cli.py::test_a_full_disk_loses_no_printed_result",
        "app/test_bad_input.py::test_bad_input_is_refused_in_one_line",
        "files/test_kept.py::test_a_foreign_file_in_the_folder_is_kept",
    ],
    "A changed line of a run": [
        "bench/test_damaged_runs.py::test_every_changed_field_is_read_or_named",
        "app/test_openers.py::test_a_name_is_printed_in_one_line",
        "files/test_results.py::test_a_result_can_be_read_back_whatever_bytes_a_name_holds",
        "bench/test_run.py::test_an_interrupted_run_goes_on_and_ends_the_same",
        "files/test_kept.py::test_a_record_may_be_cut_anywhere",
    ],
    "Bad input ends with exit code 2": [
        "app/test_bad_input.py::test_bad_input_is_refused_in_one_line",
        "app/test_cli.py::test_errors_are_one_line",
        "app/test_openers.py::test_a_device_is_named_as_one",
        "app/test_view_server.py::test_requests_that_never_end_hold_nobody_up_and_ctrl_c_ends_the_server",
    ],
    "Control characters": [
        "app/test_steering.py::test_control_characters_are_written_out",
        "app/test_steering.py::test_control_characters_of_generated_text_are_written_out",
        "app/test_steering.py::test_tables_figures_and_pages_hold_no_control_characters",
        "app/test_figures_escape.py::test_no_text_of_a_file_is_markup_in_a_drawing",
        "app/test_view_page.py::test_markup_in_tokens_is_text_on_the_page",
        "app/test_view.py::test_the_live_page_answers_only_under_its_address",
        "app/test_view_server.py::test_a_large_body_is_refused_before_it_is_read",
    ],
    "An intervention acts on every call": [
        "hooks/test_ways.py::test_an_edit_acts_as_on_the_plain_model_or_is_refused",
        "hooks/test_ways.py::test_an_edit_whose_module_never_runs_is_an_error_at_the_end",
        "hooks/test_interrupts.py::test_an_interrupted_call_leaves_nothing_for_the_next",
    ],
    "A guard that does not step in": [
        "ways/test_net.py::test_all_pairs",
        "ways/test_rules.py::test_a_policy_keeps_what_its_rule_says",
        "kv/test_policies.py::test_under_edits",
        "models/test_dtypes.py::test_what_acts_in_generation_under_another_default",
        "models/test_dtypes.py::test_loading_a_model_leaves_another_and_torch_as_they_are",
    ],
}
"""The beginning of each promise, and its tests."""


def test_every_promise_has_tests_and_every_test_is_there():
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    promises = re.findall(r"^- (.+)$", page, re.MULTILINE)
    for promise in promises:
        assert [begin for begin in PROMISES if promise.startswith(begin)], promise
    for begin in PROMISES:
        assert any(promise.startswith(begin) for promise in promises), begin


@pytest.mark.parametrize("name", sorted({name for names in PROMISES.values() for name in names}))
def test_the_test_of_a_promise_is_there(name):
    file, _, function = name.partition("::")
    assert re.search(rf"^def {function}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE)
