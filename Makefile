# A thin front to CMake. `make help` lists what there is.
.DEFAULT_GOAL := all
BUILD := build/release
VERLC := $(BUILD)/verlc
ORACLE := .venv-oracle
# make CUDA=1 builds the CUDA backend too, CUDA=0 stops doing so; VERLC_CUDA_ARCHS="80 90a" builds for these GPUs alone.
VERLC_CUDA := $(if $(CUDA),$(if $(filter 0,$(CUDA)),OFF,ON))
CUDA_OPTIONS := $(if $(VERLC_CUDA),-DVERLC_CUDA=$(VERLC_CUDA) -DVERLC_CUDA_ARCHS="$(VERLC_CUDA_ARCHS)")

.PHONY: examples fixtures oracle-venv all setup setup-test build check test demo bench bench-gpu bench-ranks \
        bench-sessions kill-agents kill-tensor-parallel tensor-parallel-matrix performance \
        bench-learn learn-calculator learn-gpu oracle soak asan tsan dist dist-test lint format fuzz clean help
all: build ## set up and build

setup: ## system packages and .venv, as far as users need them
	@scripts/setup.sh
setup-test: ## those of tests and lint too
	@scripts/setup.sh test
build: setup ## build/release/verlc; with CUDA=1 libverlc_cuda.so beside it (needs nvcc 12.4 or newer)
	@scripts/configure.sh release $(CUDA_OPTIONS)
	@cmake --build --preset release --target verlc $(if $(filter ON,$(VERLC_CUDA)),verlc_cuda)
examples: build ## libverlc.a, verlc.pc and the programs of examples/, in build/release (docs/extending.md)
	@cmake --build --preset release --target examples
check: setup-test ## what a change is tried with: lint, and the quick tests of every part; a minute on 2 cores
	@scripts/configure.sh release $(CUDA_OPTIONS)
	@cmake --build --preset release --target check_programs
	@scripts/test.sh -L check
test: setup-test ## every test that this machine can run
	@scripts/configure.sh release $(CUDA_OPTIONS)
	@cmake --build --preset release
	@scripts/test.sh
demo: build ## a tiny model learns arithmetic: SFT, then GRPO; minutes, no download
	@scripts/demo.sh
bench: build oracle-venv ## figures of this machine beside torch's and transformers', in one run
	@scripts/bench.sh
bench-gpu: ## figures of one GPU beside their bars, and torch's and vLLM's where python3 has them; after make CUDA=1
	@scripts/bench_gpu.sh
bench-sessions: ## thousands of episodes that wait for their tools while one GPU generates; after make CUDA=1
	@python3 tools/bench_sessions.py
bench-ranks: ## what several GPUs bring, beside their bars, and whether results differ; after make CUDA=1
	@python3 tools/bench_ranks.py
performance: ## the tables of docs/performance.md from docs/figures; FIGURES=build/bench/gpu.json takes new figures in
	@python3 tools/performance_tables.py $(FIGURES)
learn-calculator: build ## a model that cannot calculate learns to call a calculator on the CPU, three seeds
	@python3 tools/learn_calculator.py
bench-learn: build ## every algorithm learns a small task on the CPU, three seeds; table and curves in docs
	@scripts/bench_learn.sh
learn-gpu: ## a tiny model learns to calculate on one GPU, SFT and GRPO from random weights; after make CUDA=1
	@scripts/learn_gpu.sh
oracle: build oracle-venv ## compare with the real packages from PyPI; changes no file
	@scripts/oracle.sh
fixtures: build oracle-venv ## make tests/fixtures again with the real packages
	@scripts/oracle.sh fixtures
oracle-venv: setup
	@scripts/oracle_venv.sh $(ORACLE)
	@scripts/oracle_venv.sh .venv-trackers tools/trackers_requirements.txt
	@scripts/oracle_venv.sh .venv-ray tools/ray_requirements.txt
	@scripts/oracle_venv.sh .venv-verifiers tools/verifiers_requirements.txt
kill-agents: build ## kill -9 at 50 random moments of a run with tools and an interaction, resumed bitwise
	@VERLC=build/release/verlc .venv/bin/python tests/inv/inv11_tool_journal_test.py --kills 50 --report build/bench/cpu.json
kill-tensor-parallel: build ## kill -9 and SIGSTOP of a rank at 50 random moments of a tensor parallel run, resumed bitwise
	@VERLC=build/release/verlc .venv/bin/python tests/inv/inv11_tensor_parallel_kill_test.py --kills 50 --report build/bench/cpu.json
tensor-parallel-matrix: build ## tensor x data parallel, families, algorithms, resume: every byte as on one rank; on CPU ranks
	@VERLC=build/release/verlc .venv/bin/python tools/tensor_parallel_matrix.py --report build/bench/cpu.json
soak: build ## 1,000 kills at random points, resumed bitwise
	@scripts/soak.sh 1000
asan tsan: setup-test ## the first three rungs under a sanitizer; tsan those of them that have threads
	@scripts/configure.sh $@
	@cmake --build --preset $@
	@scripts/sanitize.sh $@
fuzz: setup-test ## every fuzz target for FUZZ_SECONDS (30) under sanitizers; libFuzzer where a clang has it
	@scripts/fuzz.sh
dist: setup ## tarball and wheel for machines without a compiler, in build/dist; CUDA backend inside where nvcc is
	@scripts/dist.sh
dist-test: ## try both in bare Debian 12, Ubuntu 22.04 and 24.04 (root, debootstrap, network)
	@scripts/dist_test.sh
lint: ## include order, formatting, function lengths, line lengths
	@scripts/setup.sh lint
	@python3 tools/lint.py
format: ## clang-format 14 over C and CUDA files
	@scripts/setup.sh lint
	@.venv/bin/clang-format -i $$(git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' \
	    ':!src/text/unicode_tables.h' ':!tests/fixtures')
clean:
	rm -rf build
help:
	@grep -hE '^[a-z -]+:.*##' Makefile | sed 's/:.*##/\t/' | column -t -s "$$(printf '\t')"
