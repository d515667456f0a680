"""One of the processes that `test_several_processes.py` starts with torchrun: trains as told in JSON."""

import json
import sys

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor

from kvfold.lab import pretrain
from kvfold.train import heal, training
from kvfold.train.trainer import HealTrainer


def shard_on_cpu() -> None:
    """Let accelerate shard by FSDP2 where it falls back to replicas: it looks for a GPU."""
    begin, gather = PartialState.__init__, HealTrainer.model_state

    def begin_as_on_gpus(self, *arguments, **options):
        begin(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    def gather_shards(self):
        assert all(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        return gather(self)

    def arrived(*arguments, **options):
        return {name: tensor.clone() for name, tensor in collect(*arguments, **options).items()}

    collect = state_dict.get_model_state_dict
    state_dict.get_model_state_dict = arrived  # copies to the CPU wait for the other process, those on it do not
    PartialState.__init__, HealTrainer.model_state = begin_as_on_gpus, gather_shards
    training.shards_here = lambda: True


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    if settings["options"].get("fsdp"):
        shard_on_cpu()
    if settings["model"] is None:
        pretrain(settings["out"], **settings["options"])
    else:
        heal(settings["model"], settings["out"], **settings["options"])
