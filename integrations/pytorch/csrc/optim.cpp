// Fused optimizers: the steps of `torch.optim` with `fused=True`, and loss scaling.
#include "foreach.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace claystone_torch {
namespace {

// The handle of an optional tensor; null if there is none.
TensorHandle optional_handle(const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? handle(*tensor) : TensorHandle();
}

// The arguments that all optimizers share, and the owner of everything their pointers refer to.
struct Step {
    Step(at::TensorList parameters, at::TensorList gradients, const std::optional<at::Tensor>& lr, const std::optional<at::Tensor>& grad_scale,
         const std::optional<at::Tensor>& found_inf, bool maximize)
        : guard(parameters[0].device()), lr(optional_handle(lr)), grad_scale(optional_handle(grad_scale)), found_inf(optional_handle(found_inf)) {
        step = {lists.add(parameters.vec()), lists.add(gradients.vec()), this->lr.get(), this->grad_scale.get(), this->found_inf.get(), maximize};
    }

    c10::DeviceGuard guard;
    TensorLists lists;
    TensorHandle lr, grad_scale, found_inf;
    ClaystoneStep step;
};

struct LearningRate {
    LearningRate(double number) : number(number) {}
    // A learning rate in host memory becomes a number, so that nothing waits for the device.
    LearningRate(const at::Tensor& given) {
        if (given.is_privateuseone()) {
            tensor = given;
        } else {
            number = given.item().toDouble();
        }
    }
    double number = 0;
    std::optional<at::Tensor> tensor;
};

template <typename Rate, bool decoupled>
void adam(
    at::TensorList self, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
    at::TensorList state_steps, Rate rate, double beta1, double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
    if (self.empty()) {
        return;
    }
    const LearningRate lr(rate);
    Step step(self, grads, lr.tensor, grad_scale, found_inf, maximize);
    const ClaystoneAdamState state{
        step.lists.add(exp_avgs.vec()), step.lists.add(exp_avg_sqs.vec()), step.lists.add(max_exp_avg_sqs.vec()),
        step.lists.add(state_steps.vec())};
    const ClaystoneAdam hyperparameters{lr.number, beta1, beta2, eps, weight_decay, amsgrad, decoupled};
    check(claystone_fused_adam(&step.step, &state, &hyperparameters));
}

template <typename Rate>
void sgd(
    at::TensorList self, at::TensorList grads, at::TensorList momentum_buffers, double weight_decay, double momentum, Rate rate,
    double dampening, bool nesterov, bool maximize, bool is_first_step, const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& found_inf) {
    if (self.empty()) {
        return;
    }
    const LearningRate lr(rate);
    Step step(self, grads, lr.tensor, grad_scale, found_inf, maximize);
    const ClaystoneSgd hyperparameters{lr.number, momentum, dampening, weight_decay, nesterov, is_first_step};
    check(claystone_fused_sgd(&step.step, step.lists.add(momentum_buffers.vec()), &hyperparameters));
}

template <typename Rate>
void adagrad(
    at::TensorList self, at::TensorList grads, at::TensorList state_sums, at::TensorList state_steps, Rate rate, double lr_decay,
    double weight_decay, double eps, bool maximize, const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
    if (self.empty()) {
        return;
    }
    const LearningRate lr(rate);
    Step step(self, grads, lr.tensor, grad_scale, found_inf, maximize);
    const ClaystoneAdagrad hyperparameters{lr.number, lr_decay, weight_decay, eps};
    check(claystone_fused_adagrad(&step.step, step.lists.add(state_sums.vec()), step.lists.add(state_steps.vec()), &hyperparameters));
}

void unscale(at::TensorList self, at::Tensor& found_inf, const at::Tensor& inv_scale) {
    if (self.empty()) {
        return;
    }
    const c10::DeviceGuard guard(self[0].device());
    TensorLists lists;
    check(claystone_unscale(lists.add(self.vec()), handle(found_inf).get(), handle(inv_scale).get()));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("_fused_adam_", &adam<double, false>);
    library.impl("_fused_adam_.tensor_lr", &adam<const at::Tensor&, false>);
    library.impl("_fused_adamw_", &adam<double, true>);
    library.impl("_fused_adamw_.tensor_lr", &adam<const at::Tensor&, true>);
    library.impl("_fused_adagrad_", &adagrad<double>);
    library.impl("_fused_adagrad_.tensor_lr", &adagrad<const at::Tensor&>);
    library.impl("_fused_sgd_", &sgd<double>);
    library.impl("_fused_sgd_.tensor_lr", &sgd<const at::Tensor&>);
    library.impl("_amp_foreach_non_finite_check_and_unscale_", &unscale);
}

} // namespace
} // namespace claystone_torch
