"""A parameter server of Ray, for serverbytes.py; run by an interpreter that has ray: python ray_server.py BYTES

As "Parameter Server" in Ray's documentation has it, in its synchronous form, which moves least: gradients of all
workers are arguments of one call, which applies them and returns the weights, and everything is a numpy array, which
actors on one host read where it lies in Ray's shared memory. A worker copies weights into memory of its own, as one
with a model does.

Does one exchange for each line that it reads, and writes `done`.
"""

import sys

import numpy
import ray

WORKERS, RATE = 2, 1e-3
COUNT = int(sys.argv[1]) // 4


@ray.remote(num_cpus=1)
class ParameterServer:
    def __init__(self):
        self.weights = numpy.random.default_rng(0).standard_normal(COUNT, dtype=numpy.float32)
        self.total = numpy.zeros_like(self.weights)

    def apply_gradients(self, *gradients):
        numpy.add(*gradients, out=self.total)
        self.total *= RATE
        self.weights -= self.total
        return self.weights

    def get_weights(self):
        return self.weights


@ray.remote(num_cpus=1)
class DataWorker:
    def __init__(self, number):
        self.gradient = numpy.random.default_rng(1 + number).standard_normal(COUNT, dtype=numpy.float32)
        self.weights = numpy.zeros_like(self.gradient)

    def compute_gradients(self, weights):
        numpy.copyto(self.weights, weights)
        return self.gradient


def main():
    ray.init(
        num_cpus=1 + WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        object_store_memory=max(200_000_000, 64 * COUNT),
    )
    server = ParameterServer.remote()
    workers = [DataWorker.remote(number) for number in range(WORKERS)]
    weights = server.get_weights.remote()
    ray.wait([weights])
    print("done", flush=True)
    for _ in sys.stdin:
        gradients = [worker.compute_gradients.remote(weights) for worker in workers]
        weights = server.apply_gradients.remote(*gradients)
        ray.wait([weights])
        print("done", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
