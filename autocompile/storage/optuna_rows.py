"""Optuna's rows of a study, derived from our records, so that optuna-dashboard and Optuna's own tools can open it."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from autocompile.errors import UserError
from autocompile.records import State, TrialRecord
from autocompile.space import Config, Parameter, Range
from autocompile.spec import Role, StudySpec
from autocompile.storage.database import Patience, be_patient, engine_options, show


class OptunaRows:
    """Optuna's storage on the same database, opened and closed with ours. Only numbers and states come back from it."""

    def __init__(self, url: sa.URL, patience: Patience) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._shown = show(url)
        self._patience = patience
        # Checked by hand, since the constructor's own check raises and leaves its connections open.
        self._rows = RDBStorage(
            url.render_as_string(hide_password=False), engine_options(url), skip_compatibility_check=True
        )
        be_patient(self._rows.engine, patience)

    def close(self) -> None:
        self._rows.remove_session()
        self._rows.engine.dispose()

    def check_version(self) -> None:
        found, wanted = self._rows.get_current_version(), self._rows.get_head_version()
        if found == wanted:
            return
        known = found in self._rows.get_all_versions()
        cure = "run `optuna storage upgrade`" if known else "upgrade optuna, or give autocompile a database of its own"
        raise UserError(f"storage {self._shown}: Optuna's tables: expected version {wanted}, found {found}; {cure}")

    def create(self, name: str) -> None:
        """`optuna.exceptions.DuplicatedStudyError` if there is one."""
        with self._patience.reaching():
            self._rows.create_new_study([StudyDirection.MAXIMIZE], study_name=name)

    def delete(self, name: str) -> None:
        with self._patience.reaching():
            if any(study.study_name == name for study in self._rows.get_all_studies()):
                self._rows.delete_study(self._rows.get_study_id_from_name(name))

    def open_trial(self, name: str, trial: FrozenTrial) -> int:
        with self._patience.reaching():
            return self._rows.get_trial(self._rows.create_new_trial(self._study(name), trial)).number

    def tell(self, name: str, record: TrialRecord) -> None:
        """End the trial as its record says; nothing happens if it has ended."""
        with self._patience.reaching():
            trial = self._rows.get_trial_id_from_study_id_trial_number(self._study(name), record.number)
            if self._rows.get_trial(trial).state.is_finished():
                return
            for key, value in _constraints(record).items():
                self._rows.set_trial_system_attr(trial, key, value)
            state = _state(record)
            values = [record.value] if state is TrialState.COMPLETE and record.value is not None else None
            self._rows.set_trial_state_values(trial, state, values)

    def mend(self, name: str, spec: StudySpec, records: Sequence[TrialRecord]) -> None:
        """Make Optuna's rows say what our records say, whatever a kill left out. For the study's one writer only."""
        by_number = {record.number: record for record in records}
        with self._patience.reaching():
            study = self._study(name)
            trials = self._rows.get_all_trials(study, deepcopy=False)
            ended = {trial.number for trial in trials if trial.state.is_finished()}
            for number in range(len(trials), max(by_number, default=-1) + 1):
                record = by_number.get(number)
                missing = new_trial(spec, record.config, record.role) if record else create_trial(state=TrialState.FAIL)
                self._rows.create_new_trial(study, missing)
            for trial in trials:  # opened by a process that was killed before our row was written
                if trial.state is TrialState.RUNNING and trial.number not in by_number:
                    lost = self._rows.get_trial_id_from_study_id_trial_number(study, trial.number)
                    self._rows.set_trial_state_values(lost, TrialState.FAIL)
        for record in records:
            if record.state is not State.RUNNING and record.number not in ended:
                self.tell(name, record)

    def _study(self, name: str) -> int:
        try:
            return self._rows.get_study_id_from_name(name)
        except KeyError:  # killed between our row and this one
            return self._rows.create_new_study([StudyDirection.MAXIMIZE], study_name=name)


def new_trial(spec: StudySpec, config: Config, role: Role) -> FrozenTrial:
    """A running trial: as parameters the knobs the study searches, and the whole config beside them."""
    distributions = {
        name: found
        for name, blocks in spec.space.parameters.items()
        if name not in spec.pinned and name in config and (found := _distribution(blocks, config[name]))
    }
    return create_trial(
        state=TrialState.RUNNING,
        params={name: config[name] for name in distributions},
        distributions=distributions,
        user_attrs={"config": dict(config), "role": str(role)},
    )


def _distribution(blocks: Sequence[Parameter], value: object) -> BaseDistribution | None:
    """One for all blocks of a parameter, since Optuna wants it alike in all trials; None if it lacks this value."""
    ranges = [block for block in blocks if isinstance(block, Range)]
    if len(ranges) == len(blocks) and len({block.scale for block in ranges}) == 1:
        low, high = min(block.low for block in ranges), max(block.high for block in ranges)
        inside = isinstance(value, int) and low <= value <= high
        return IntDistribution(low, high, log=ranges[0].scale == "log2") if inside else None
    choices = tuple(dict.fromkeys(choice for block in blocks for choice in block.values()))
    return CategoricalDistribution(choices) if value in choices else None


def _state(record: TrialRecord) -> TrialState:
    """A complete record without a full-depth value is FAIL: Optuna would take it for the study's best otherwise."""
    if record.state is State.COMPLETE and record.value is None:
        return TrialState.FAIL
    return TrialState[record.state.value]


def _constraints(record: TrialRecord) -> dict[str, float]:
    """Optuna's attributes of a violated constraint that is named after the failure, for a failure of the config."""
    if record.state is not State.PRUNED or record.failure is None:
        return {}
    return dict(create_trial(state=TrialState.PRUNED, constraints={str(record.failure.kind): 1.0}).system_attrs)
