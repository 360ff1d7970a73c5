"""A program's run on one stage whose loss is veRL's."""

from dataclasses import dataclass

from torch import Tensor

from psrl.backend.train.inputs import EdgeInputs
from psrl.backend.train.predictions import edge_predictions
from psrl.backend.train.stage import StageRun

from .sample_loss import WholeSampleLoss


@dataclass
class VerlStageRun(StageRun):
    """Takes the gradient at each edge from `whole`, and reports entropies to it."""

    whole: WholeSampleLoss | None = None

    def _predictions(self, edges: EdgeInputs, hidden_TH: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.whole is not None
        logprob_E, entropy_E = edge_predictions(
            self.model, hidden_TH, edges, self.loss_options, self.whole.with_entropy
        )
        self.logprobs[edges.number] = logprob_E.detach().double().cpu().numpy()
        if entropy_E is not None:
            self.whole.entropy[edges.number] = entropy_E.detach().to(self.whole.entropy)
        return logprob_E, entropy_E

    def _loss(self, edges: EdgeInputs | None, hidden_TH: Tensor) -> Tensor:
        if edges is None:
            return super()._loss(edges, hidden_TH)
        assert self.whole is not None
        logprob_E, entropy_E = self._predictions(edges, hidden_TH)
        by_logprob_E, by_entropy_E = self.whole.gradients(edges.number, logprob_E, entropy_E)
        loss = (by_logprob_E.to(logprob_E) * logprob_E).sum()
        if entropy_E is not None:
            loss = loss + (by_entropy_E.to(entropy_E) * entropy_E).sum()
        return loss
