.PHONY: check test smoke

check:  ## format, lint, types: what CI and pre-commit run
	ruff format --check .
	ruff check .
	mypy

test:  ## the whole test suite
	pytest

smoke:  ## every norm mode and anchor, a few seconds each
	python train.py -m experiment=smoke norm=baseline,internal_taper,all_taper anchor=none,fixed_target
