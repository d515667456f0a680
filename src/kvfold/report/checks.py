"""What `verify` found, in the few lines that a person wants to see."""

from collections.abc import Mapping
from typing import Any

from kvfold.report.formats import number_text


def verification_facts(result: Mapping[str, Any]) -> dict[str, str]:
    """Label and text of each check; `result` as `Verification.to_dict` gives it.

    The errors of all modules are left to the JSON; shown are the first that diverges and the largest.
    """
    errors = result["module_errors"]
    worst = max(errors, key=errors.__getitem__)
    first = result["first_diverging_module"]
    printed, measured = result["printed_bytes_per_token"], result["measured_bytes_per_token"]
    return {
        "logits, largest difference": number_text(result["max_logit_difference"]),
        "logits, mean difference": number_text(result["mean_logit_difference"]),
        "KL(original || converted)": f"{number_text(result['kl'])} nats per token",
        "same most likely token": f"{result['top1_agreement']:.1%} of {result['tokens']:,}",
        "first diverging module": "none" if first is None else f"{first} ({errors[first]:.1%})",
        "largest relative error": f"{errors[worst]:.1%} in {worst}",
        "cached = uncached": f"largest difference {number_text(result['cached_vs_uncached'])}",
        "absorbed = expanded": f"largest difference {number_text(result['absorbed_vs_expanded'])}",
        "printed = measured bytes per token": f"{number_text(printed)} and {number_text(measured)} (float32)",
        "consistent with itself": "yes" if result["passed"] else "NO: a bug; please report it",
    }
