"""``python ray_host.py FOLDER``: a Ray of this machine until stdin ends; the first line of stdout is its address."""

import sys

import ray

if __name__ == "__main__":
    here = ray.init(num_cpus=4, include_dashboard=False, _temp_dir=sys.argv[1], log_to_driver=False)
    print(here.address_info["gcs_address"], flush=True)  # noqa: T201
    sys.stdin.read()
