// Registers the rows of operators.toml as PyTorch kernels.
#pragma once

#include <string>
#include <vector>

namespace claystone_torch {

// One program of a row, and the condition under which it runs; an empty condition always holds.
struct RowText {
    std::string condition, program;
    bool elementwise, apart;
};

// Adds the row of an operator, named as in `add.Tensor`. The row also serves the operator's in-place and `out` forms. Returns
// whether this PyTorch version has the operator.
bool add_row(const std::string& name, const std::vector<RowText>& texts);
// Registers all rows with PyTorch's dispatcher. Returns the operators, with their overloads, that a row covers.
std::vector<std::string> register_rows();

} // namespace claystone_torch
