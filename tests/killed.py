"""Sweeps that are killed at random moments and started again."""

import subprocess
import time

import psutil


def children(driver):
    """Every process that a driver has started."""
    return psutil.Process(driver.pid).children(recursive=True)


def written(out, pattern="job*"):
    """name -> inode and time of every file of a job."""
    stats = {path.name: path.stat() for path in out.glob(pattern)}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def killed_until_done(command, out, kills, rng, workers_of=children, finished=written):
    """Run a driver again and again; kill -9 one of its workers, then itself, at random moments; then let it end.

    Returns:
        How many kills there were, fewer if all was finished before. What was finished before a kill is never written
        again.
    """
    for number in range(kills):
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = finished(out)
        while driver.poll() is None and len(finished(out)) == len(before):
            time.sleep(0.02)
        time.sleep(rng.random() * 0.3)
        if driver.poll() is not None:  # all was finished
            return number
        workers = workers_of(driver)
        victim = rng.choice(workers) if number % 2 == 0 and workers else psutil.Process(driver.pid)
        victim.kill()
        if victim.pid != driver.pid:
            time.sleep(rng.random() * 0.3)
        driver.kill()
        driver.wait()
        psutil.wait_procs(workers, timeout=60)  # they end with the driver
        assert not [one for one in workers if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        now = finished(out)
        assert {name: now[name] for name in before} == before
    before = finished(out)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    now = finished(out)
    assert {name: now[name] for name in before} == before
    return kills
