"""A cluster that accepts jobs and runs none, for tests."""


def install_fake_slurm(folder, monkeypatch):
    """Puts an sbatch on the PATH that accepts every script and numbers jobs from 1."""
    programs, jobs = folder / "bin", folder / "jobs"
    programs.mkdir()
    for name, text in (("srun", ""), ("sbatch", f'echo x >> {jobs}; echo "Submitted batch job $(wc -l < {jobs})"')):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
