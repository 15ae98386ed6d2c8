# What a developer types here. Each target sets up .venv by itself; PYTHON=/path/to/python chooses the Python for it.
.DEFAULT_GOAL := help
.PHONY: help demo test check lint types format audit serve bench bench-micro soak docs dist compiled pure clean

ARGS ?=
export PYTHON

# Made again only when pyproject.toml has changed since.
.venv/.ready: pyproject.toml
	@tools/make-venv.sh

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: compiled ## a demo gateway with the sidecar in front, proved by two turns; ARGS=--once ends after the proof
	@.venv/bin/hermes-sidecar demo $(ARGS)

test: compiled ## every test; ARGS="-k mapping" chooses some
	.venv/bin/pytest $(ARGS)

check: lint types ## what a change must pass beside the tests

lint: .venv/.ready ## ruff: rules and layout; bandit: what looks insecure
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/bandit --quiet --configfile pyproject.toml --recursive sidecar

types: .venv/.ready ## mypy --strict, tests included
	.venv/bin/mypy

format: .venv/.ready ## let ruff repair what it can
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

audit: .venv/.ready ## look the installed packages up among the known vulnerabilities; needs the network, so not in check
	.venv/bin/python -m venv .cache/audit
	.cache/audit/bin/pip install --quiet --upgrade pip-audit
	.venv/bin/pip freeze --exclude-editable > .cache/audit/packages.txt
	.cache/audit/bin/pip-audit --strict --disable-pip --no-deps --requirement .cache/audit/packages.txt

serve: compiled ## run the sidecar in the foreground; ARGS="--config FILE"
	@.venv/bin/hermes-sidecar serve $(ARGS)

bench: compiled ## compare with nginx and a plain proxy on this machine; BENCH_ROUNDS=5, ARGS="--peers direct,sidecar"
	@.venv/bin/python -m bench $(ARGS)

soak: compiled ## half an hour of mixed load, and whether anything grows; SOAK_MINUTES=5 for less
	@.venv/bin/python -m bench.soak $(ARGS)

bench-micro: compiled ## what each part costs, in microseconds
	@.venv/bin/python -m bench.micro

docs: .venv/.ready ## build these pages as a site in site/, every warning an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict $(ARGS)

dist: .venv/.ready ## wheel and sdist in dist/, checked as the package index would
	rm -rf dist
	.venv/bin/python -m build
	.venv/bin/twine check --strict dist/*

# Asked each time, since a file's time does not tell whether it was compiled from what is written now (sidecar/compiled.py).
compiled: .venv/.ready ## compile the hot path if its sources have changed; demo, test, serve and bench do so by themselves
	@.venv/bin/python tools/compile.py

pure: ## remove the compiled modules, for pdb and coverage; SIDECAR_COMPILE=never keeps the other targets from making them
	find sidecar -name '*.so' -exec rm -f {} +
	rm -f sidecar/_compiled.sha256

clean: pure ## remove everything that the other targets made
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info
	find sidecar tests -name __pycache__ -type d -prune -exec rm -rf {} +
