package master

import (
	"context"
	"errors"
	"log/slog"

	"dlrover-run/internal/app/kube"
)

// devices looks up the broken devices of a launcher: those of the pod with its name. One call is under way at a time.
func devices(find func(context.Context, string) (kube.Place, error), log *slog.Logger) func(context.Context,
	string) []string {
	denied := false
	return func(ctx context.Context, node string) []string {
		if denied {
			return nil
		}
		place, err := find(ctx, node)
		switch {
		case errors.Is(err, kube.ErrForbidden), errors.Is(err, kube.ErrNoPod):
			denied = true
			log.Info("the devices of a node that has failed are not looked up: " +
				"docs/kubernetes/rbac-pods.yaml allows it")
		case errors.Is(err, kube.ErrNotFound), errors.Is(err, context.Canceled): // not a pod, or this master ends
		case err != nil:
			log.Warn("the API server does not say whether the devices of a node that has failed are healthy", "node", node,
				"err", err)
		}
		return place.Unhealthy
	}
}
