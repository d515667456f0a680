"""Whether an export computes in the runtimes what the model computes here, found out by running them."""

from kvfold.doctor.doctor import Check, Diagnosis, doctor

__all__ = ["Check", "Diagnosis", "doctor"]
