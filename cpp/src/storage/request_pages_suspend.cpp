// Suspending and resuming without a manager. Those of a manager move their host history with them,
// and use PageMigration themselves.
#include "storage/page_migration.hpp"

namespace sparse_kvcm {

bool RequestPages::is_suspended() const {
  const auto held = lock();
  return suspended_;
}

bool RequestPages::suspend(Stream stream) {
  const auto held = lock();
  check_usable("RequestPages.suspend", stream);
  return suspended_ || migrate(PageDirection::kToHost, stream);
}

bool RequestPages::resume(Stream stream) {
  const auto held = lock();
  check_usable("RequestPages.resume", stream);
  return !suspended_ || migrate(PageDirection::kToDevice, stream);
}

bool RequestPages::migrate(PageDirection direction, Stream stream) {
  PageMigration migration(*this, direction);
  if (!migration.reserve(history_length_, stream)) return false;
  try {
    migration.copy(stream);
    migration.commit(storage_->backend->record(stream));
  } catch (...) {
    migration.give_back(stream);
    throw;
  }
  last_stream_ = stream;
  return true;
}

}  // namespace sparse_kvcm
