// Rows of the table.
#pragma once

#include <string>
#include <vector>

namespace claystone_torch {

// One program of a row: it is run where the condition holds; an empty one always does.
struct RowText {
    std::string condition, program;
    bool elementwise, apart;
};

// Adds the row of an operator, named as `add.Tensor`; it is that of its form in place and of that with `out` as well. Gives
// whether this PyTorch has the operator.
bool add_row(const std::string& name, const std::vector<RowText>& texts);
// After the last row: has PyTorch call it. Gives all operators, with their overloads, that a row is for.
std::vector<std::string> register_rows();

} // namespace claystone_torch
