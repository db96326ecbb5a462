package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"
)

// An ExternalFault is an object without a namespace that asks NVSentinel to take a node over: see its ADR-049. The
// health event in it cannot be changed. That of a mark has the annotation Key, which holds the mark's entry.
const (
	faultGroup = "nvsentinel.dgxc.nvidia.com"
	faultKind  = "ExternalFault"
	faultsPath = "/apis/" + faultGroup + "/v1/externalfaults"
)

// The rights that the level ExternalFault needs.
var (
	listFaults   = right{"list", "externalfaults"}
	createFaults = right{"create", "externalfaults"}
	patchFaults  = right{"patch", "externalfaults"}
	deleteFaults = right{"delete", "externalfaults"}
)

// ErrNoFaults means that the cluster does not have the kind ExternalFault.
var ErrNoFaults = errors.New("the cluster has no kind " + faultKind + " of " + faultGroup +
	"/v1: is NVSentinel installed?")

// fault holds the fields of an ExternalFault that we use.
type fault struct {
	Metadata struct {
		metadata
		DeletionTimestamp string // "": it is not being deleted
	}
	Spec   struct{ HealthEvent struct{ NodeName string } }
	Status struct{ CompletionTime string }
}

// deleted reports whether f is on its way out, and its finalizers have work to do.
func (f fault) deleted() bool { return f.Metadata.DeletionTimestamp != "" }

// faults returns all ExternalFaults, or those of one node.
func (c *Client) faults(ctx context.Context, node string) (faults []fault, err error) {
	err = list(ctx, c, request{right: listFaults, path: faultsPath}, func(f fault) {
		if node == "" || f.Spec.HealthEvent.NodeName == node {
			faults = append(faults, f)
		}
	})
	if errors.Is(err, ErrNotFound) {
		err = ErrNoFaults
	}
	return faults, err
}

// report creates the ExternalFault of a mark, or renews its entry. Where another's is open for the node, that will do.
// One that is being deleted is waited for: NVSentinel is about to give the node back.
func (c *Client) report(ctx context.Context, m Mark) error {
	faults, err := c.faults(ctx, m.Node)
	if err != nil {
		return err
	}
	record, err := single(m.Owner, newEntry(ExternalFault, m))
	if err != nil {
		return err
	}
	other := ""
	for _, f := range faults {
		if f.deleted() {
			return fmt.Errorf("kube: the %s %s of node %s is being deleted: another has to wait for that", faultKind,
				f.Metadata.Name, m.Node)
		}
		r, err := parseRecord(f.Metadata.Annotations[Key])
		if e, own := r.entries[m.Owner]; err == nil && own && e.Since.Equal(m.Since) {
			return c.renew(ctx, f, record)
		}
		if f.Status.CompletionTime == "" {
			other = f.Metadata.Name
		}
	}
	if other != "" {
		c.log.Info("a node has an open ExternalFault already", "node", m.Node, "name", other)
		return nil
	}
	err = c.rest.do(ctx, request{
		right: createFaults, method: "POST", path: faultsPath, body: newFault(m, record),
	}, nil)
	if errors.Is(err, errConflict) { // the answer to an earlier try was lost
		return nil
	}
	return err
}

// renew replaces the record of an ExternalFault, if it is another one.
func (c *Client) renew(ctx context.Context, f fault, record string) error {
	if f.Metadata.Annotations[Key] == record {
		return nil
	}
	return c.rest.do(ctx, request{
		right: patchFaults, method: "PATCH", path: faultPath(f), contentType: "application/merge-patch+json",
		body: map[string]any{"metadata": map[string]any{"annotations": map[string]any{Key: record}}},
	}, nil)
}

func faultPath(f fault) string { return faultsPath + "/" + url.PathEscape(f.Metadata.Name) }

func newFault(m Mark, record string) map[string]any {
	return map[string]any{
		"apiVersion": faultGroup + "/v1", "kind": faultKind,
		"metadata": map[string]any{"name": objectName(m), "annotations": map[string]any{Key: record}},
		"spec": map[string]any{"healthEvent": map[string]any{
			"version": 1, "agent": "dlrover-master", "componentClass": "node", "checkName": ConditionType,
			"nodeName": m.Node, "isHealthy": false, "isFatal": true,
			"recommendedAction": "CUSTOM", "customRecommendedAction": "external-remediation",
			"errorCode": []string{class(m.Reason)}, "message": message(newEntry(ExternalFault, m)),
			"entitiesImpacted":   []map[string]any{{"entityType": "Node", "entityValue": m.Node}},
			"generatedTimestamp": m.Since.Format(time.RFC3339),
		}},
	}
}

// objectName names the object about a mark. A mark that begins once more has another name.
func objectName(m Mark) string {
	id := sha256.Sum256([]byte(m.Owner + "\n" + m.Node + "\n" + strconv.FormatInt(m.Since.Unix(), 10)))
	return "dlrover-faulty." + hex.EncodeToString(id[:16])
}

// Withdraw is Remove for marks of level ExternalFault: it deletes the ExternalFaults of m.Owner about m.Node.
func (c *Client) Withdraw(ctx context.Context, m Mark) error {
	if err := errors.Join(checkNode(m.Node), checkOwner(m.Owner)); err != nil {
		return err
	}
	faults, err := c.faults(ctx, m.Node)
	errs := []error{err}
	for _, f := range faults {
		r, err := parseRecord(f.Metadata.Annotations[Key])
		if err != nil || !r.held(m.Owner, m.Until) || f.deleted() {
			continue
		}
		err = c.rest.do(ctx, request{right: deleteFaults, method: "DELETE", path: faultPath(f)}, nil)
		if !errors.Is(err, ErrNotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Reported is Marks for those of level ExternalFault.
func (c *Client) Reported(ctx context.Context) (marks []Mark, errs []error) {
	faults, err := c.faults(ctx, "")
	if err != nil {
		errs = append(errs, err)
	}
	for _, f := range faults {
		if f.deleted() {
			continue
		}
		r, err := parseRecord(f.Metadata.Annotations[Key])
		if err != nil {
			errs = append(errs, fmt.Errorf("kube: %s %s: %w", faultKind, f.Metadata.Name, err))
			continue
		}
		marks = append(marks, r.marks(f.Spec.HealthEvent.NodeName)...)
	}
	return marks, errs
}
